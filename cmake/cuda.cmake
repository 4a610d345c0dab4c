# Toolkit discovery, target architectures and flags.
#
#   ANYFLASH_CUDA    AUTO (default): build CUDA kernels if nvcc is found. ON: it must be. OFF: CPU only.
#   ANYFLASH_ARCHS   as CMAKE_CUDA_ARCHITECTURES: 80-real is machine code, 80-virtual PTX, 80 both;
#                    or `release`, what released wheels hold. Default: machine code for the GPUs of
#                    this machine, else 80.

set(ANYFLASH_CUDA AUTO CACHE STRING "Build CUDA kernels: AUTO, ON or OFF")
set_property(CACHE ANYFLASH_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ANYFLASH_ARCHS "" CACHE STRING "GPU architectures, as CMAKE_CUDA_ARCHITECTURES")
set(ANYFLASH_KERNEL_SET full CACHE STRING "Kernels to build: full, ci, or minimal for development")
set_property(CACHE ANYFLASH_KERNEL_SET PROPERTY STRINGS full ci minimal)

# Machine code also runs on later GPUs of the same major version: 80's on 8.6 and 8.9. PTX is compiled
# by the driver, for what comes after.
set(
  ANYFLASH_RELEASE_ARCHS
  80-real
  90-real
  100-real
  120-real
  80-virtual
)

# nvcc from the PyPI packages nvidia-cuda-nvcc etc. (13.x) of the build environment.
function(anyflash_find_pypi_nvcc output)
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -c
      "import glob, sys; print(next((f for p in sys.path for f in glob.glob(p + '/nvidia/cu13/bin/nvcc')), ''))"
    OUTPUT_VARIABLE nvcc
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
  )
  set(${output} "${nvcc}" PARENT_SCOPE)
endfunction()

# Sets ANYFLASH_HAS_CUDA and enables the language. A macro: enable_language needs directory scope.
macro(anyflash_setup_cuda)
  set(ANYFLASH_HAS_CUDA OFF)
  if(ANYFLASH_CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
      find_program(
        ANYFLASH_NVCC
        NAMES nvcc
        HINTS
        ENV CUDACXX
        ENV CUDA_HOME
        ENV CUDA_PATH
        /usr/local/cuda
        PATH_SUFFIXES bin
      )
      if(NOT ANYFLASH_NVCC)
        unset(ANYFLASH_NVCC CACHE)
        anyflash_find_pypi_nvcc(ANYFLASH_NVCC)
        if(ANYFLASH_NVCC)
          # That layout has no lib64, and its libraries no development links.
          get_filename_component(root "${ANYFLASH_NVCC}/../.." ABSOLUTE)
          set(CMAKE_CUDA_FLAGS_INIT "-L${root}/lib")
        endif()
      endif()
      if(ANYFLASH_NVCC AND NOT DEFINED ENV{CUDACXX})
        set(CMAKE_CUDA_COMPILER "${ANYFLASH_NVCC}")
      endif()
    endif()
    if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES OFF) # -gencode options are given below
      endif()
      enable_language(CUDA)
      set(ANYFLASH_HAS_CUDA ON)
    elseif(NOT ANYFLASH_CUDA STREQUAL "AUTO")
      message(
        FATAL_ERROR
        "ANYFLASH_CUDA is ON but no nvcc was found. Install a CUDA toolkit (12.4 or later) and put "
        "nvcc on PATH, set CUDACXX, or run: pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm "
        "nvidia-cuda-runtime nvidia-cuda-cccl"
      )
    endif()
  endif()
  if(ANYFLASH_HAS_CUDA)
    message(STATUS "anyflash: CUDA kernels with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  else()
    message(STATUS "anyflash: CPU-only build (ANYFLASH_CUDA=${ANYFLASH_CUDA})")
  endif()
endmacro()

# Sets ${archs_output} to names ("sm_80", "compute_80") and ${options_output} to nvcc's options. All
# code is assembled from one compute_80 front-end pass: 10 s more for four targets, where a pass for
# each would take 60 s.
function(anyflash_cuda_archs archs_output options_output)
  set(requested ${ANYFLASH_ARCHS})
  if(requested STREQUAL "release")
    set(requested ${ANYFLASH_RELEASE_ARCHS})
  endif()
  if(NOT requested)
    execute_process(
      COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE present
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
      RESULT_VARIABLE failed
    )
    if(NOT failed AND present)
      string(REPLACE "." "" present "${present}")
      string(REPLACE "\n" "-real;" requested "${present}-real")
      list(REMOVE_DUPLICATES requested)
    else()
      set(requested 80)
    endif()
  endif()
  set(archs "")
  set(options "")
  foreach(arch IN LISTS requested)
    if(NOT arch MATCHES "^([0-9]+)(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
      message(
        FATAL_ERROR
        "ANYFLASH_ARCHS has '${arch}'; 'release', or 80 and later are allowed, these alone or with "
        "-real or -virtual"
      )
    endif()
    set(number ${CMAKE_MATCH_1})
    if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
      list(APPEND archs sm_${number})
      list(APPEND options "SHELL:-gencode arch=compute_80,code=sm_${number}")
    endif()
    if(NOT CMAKE_MATCH_2 STREQUAL "-real")
      set(ptx ON)
    endif()
  endforeach()
  if(ptx)
    list(APPEND archs compute_80)
    list(APPEND options "SHELL:-gencode arch=compute_80,code=compute_80")
  endif()
  message(STATUS "anyflash: GPU code ${archs}")
  set(${archs_output} ${archs} PARENT_SCOPE)
  set(${options_output} ${options} PARENT_SCOPE)
endfunction()

# nvcc takes up to 4 GB a job: as many jobs as memory holds.
function(anyflash_limit_cuda_jobs target)
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY) # MiB
  math(EXPR jobs "${memory} / 5120")
  if(jobs LESS 1)
    set(jobs 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS anyflash_nvcc=${jobs})
  set_target_properties(${target} PROPERTIES JOB_POOL_COMPILE anyflash_nvcc)
endfunction()
