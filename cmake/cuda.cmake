# Toolkit discovery, target architectures and flags.
#
#   ANYFLASH_CUDA    AUTO (default): build CUDA kernels if nvcc is found. ON: it must be. OFF: CPU only.
#   ANYFLASH_ARCHS   as CMAKE_CUDA_ARCHITECTURES: 80-real is machine code, 80-virtual PTX, 80 both;
#                    90a, and what else a family of kernels.cmake names, adds the kernels for that
#                    architecture alone; or `release`, what released wheels hold. Default: machine
#                    code for the GPUs of this machine, 90a with 90; without any, 80 and 90a.

set(ANYFLASH_CUDA AUTO CACHE STRING "Build CUDA kernels: AUTO, ON or OFF")
set_property(CACHE ANYFLASH_CUDA PROPERTY STRINGS AUTO ON OFF)
set(ANYFLASH_ARCHS "" CACHE STRING "GPU architectures, as CMAKE_CUDA_ARCHITECTURES")
set(ANYFLASH_KERNEL_SET full CACHE STRING "Kernels to build: full, ci, or minimal for development")
set_property(CACHE ANYFLASH_KERNEL_SET PROPERTY STRINGS full ci minimal)

# Machine code also runs on later GPUs of the same major version: 80's on 8.6 and 8.9. PTX is compiled
# by the driver, for what comes after.
# The architectures of families for one architecture alone come beside these.
set(
  ANYFLASH_RELEASE_ARCHS
  80-real
  90-real
  100-real
  120-real
  80-virtual
)
# Jetson and DRIVE run no machine code of other GPUs. Thor's number changed with CUDA 13.
set(ANYFLASH_ORIN_ARCH 87-real)
set(ANYFLASH_THOR_ARCH 110-real)
set(ANYFLASH_THOR_ARCH_CUDA_12 101-real)

# nvcc's: to build at all, and for what came with Blackwell.
set(ANYFLASH_OLDEST_NVCC 12.4)
set(ANYFLASH_OLDEST_NVCC_FOR_100 12.8)

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

# Sets ${output} to ON if nvcc is new enough. One that is not is an error only where CUDA is wanted.
function(anyflash_check_nvcc output)
  set(${output} ON PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS ANYFLASH_OLDEST_NVCC)
    set(kind FATAL_ERROR)
    if(ANYFLASH_CUDA STREQUAL "AUTO")
      set(kind WARNING)
      set(${output} OFF PARENT_SCOPE)
    endif()
    message(
      ${kind}
      "anyflash: no CUDA kernels can be built with nvcc ${CMAKE_CUDA_COMPILER_VERSION} "
      "(${CMAKE_CUDA_COMPILER}); ${ANYFLASH_OLDEST_NVCC} and later are allowed. Name a newer one by "
      "CMAKE_CUDA_COMPILER, or build for the CPU alone by ANYFLASH_CUDA=OFF"
    )
  endif()
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
      # -gencode options are given below. What a parent project or the command line says is not ours.
      set(CMAKE_CUDA_ARCHITECTURES OFF)
      enable_language(CUDA)
      anyflash_check_nvcc(ANYFLASH_HAS_CUDA)
    elseif(NOT ANYFLASH_CUDA STREQUAL "AUTO")
      message(
        FATAL_ERROR
        "ANYFLASH_CUDA is ON but no nvcc was found. Install a CUDA toolkit "
        "(${ANYFLASH_OLDEST_NVCC} or later) and put "
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

# The architectures of ANYFLASH_ARCHS, by default those of this machine's GPUs.
function(anyflash_requested_archs output)
  anyflash_specific_archs(specific)
  list(TRANSFORM specific APPEND -real OUTPUT_VARIABLE all_specific)
  set(requested ${ANYFLASH_ARCHS})
  if(requested STREQUAL "release")
    set(requested ${ANYFLASH_RELEASE_ARCHS} ${all_specific})
    if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
        set(ANYFLASH_THOR_ARCH ${ANYFLASH_THOR_ARCH_CUDA_12})
      endif()
      list(APPEND requested ${ANYFLASH_ORIN_ARCH} ${ANYFLASH_THOR_ARCH})
    endif()
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
      foreach(arch IN LISTS specific)
        string(REGEX REPLACE "[a-z]$" "-real" of_all "${arch}")
        if(of_all IN_LIST requested)
          list(APPEND requested ${arch}-real)
        endif()
      endforeach()
    else()
      set(requested 80 ${all_specific})
    endif()
  endif()
  foreach(arch IN LISTS requested)
    set(number "")
    if(arch MATCHES "^([0-9]+)([a-z]?)(-real|-virtual)?$")
      set(number ${CMAKE_MATCH_1})
      set(with_letter ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    endif()
    if(
      number STREQUAL ""
      OR number LESS 80
      OR NOT (with_letter STREQUAL number OR with_letter IN_LIST specific)
    )
      message(
        FATAL_ERROR
        "ANYFLASH_ARCHS has '${arch}'; 'release', or 80 and later are allowed, these alone or with "
        "-real or -virtual, and ${specific}"
      )
    endif()
    if(
      CMAKE_CUDA_COMPILER_VERSION
      AND number GREATER_EQUAL 100
      AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS ANYFLASH_OLDEST_NVCC_FOR_100
    )
      message(
        FATAL_ERROR
        "anyflash: GPU code for '${arch}' needs nvcc ${ANYFLASH_OLDEST_NVCC_FOR_100} or later; this "
        "one is ${CMAKE_CUDA_COMPILER_VERSION}. Name a newer one by CMAKE_CUDA_COMPILER, or give "
        "ANYFLASH_ARCHS numbers below 100 (what is asked for: ${requested})"
      )
    endif()
  endforeach()
  if(NOT requested MATCHES "(^|;)[0-9]+(-real|-virtual)?(;|$)")
    message(
      FATAL_ERROR
      "ANYFLASH_ARCHS is '${requested}', for kernels of one architecture alone; add the number "
      "without its letter, for all other kernels"
    )
  endif()
  set(${output} ${requested} PARENT_SCOPE)
endfunction()

# Sets ${options} to nvcc's options for the requested architectures that match a regular expression,
# and ${options}_NAMES to the names of that code. An architecture gets the front-end pass for the
# latest of `front_ends` that it has; PTX is of the first.
function(anyflash_gencode options requested pattern front_ends)
  set(result "")
  set(names "")
  set(ptx OFF)
  list(GET front_ends 0 first)
  foreach(arch IN LISTS requested)
    string(REGEX MATCH "^(([0-9]+)[a-z]?)(-real|-virtual)?$" _ "${arch}")
    set(with_letter ${CMAKE_MATCH_1})
    set(number ${CMAKE_MATCH_2})
    set(kind "${CMAKE_MATCH_3}")
    if(NOT with_letter MATCHES "${pattern}")
      continue()
    endif()
    set(front_end ${first})
    foreach(candidate IN LISTS front_ends)
      if(candidate MATCHES "^[0-9]+$" AND number GREATER_EQUAL candidate)
        set(front_end ${candidate})
      endif()
    endforeach()
    if(NOT kind STREQUAL "-virtual")
      list(APPEND names sm_${with_letter})
      list(APPEND result "SHELL:-gencode arch=compute_${front_end},code=sm_${with_letter}")
    endif()
    # PTX of one architecture alone would serve no other.
    if(NOT kind STREQUAL "-real" AND number STREQUAL with_letter)
      set(ptx ON)
    endif()
  endforeach()
  if(ptx)
    list(APPEND names compute_${first})
    list(APPEND result "SHELL:-gencode arch=compute_${first},code=compute_${first}")
  endif()
  set(${options} "${result}" PARENT_SCOPE)
  set(${options}_NAMES "${names}" PARENT_SCOPE)
endfunction()

# Sets ${archs} to the names of the GPU code ("sm_80", "sm_90a", "compute_80"). Sets ${archs}_FAMILY
# to nvcc's options for each family of kernels that has an architecture; ${archs}_FAMILIES names
# these. A family's code is assembled from one front-end pass: 10 s more for four targets, where a
# pass for each would take 60 s. ${archs}_FAMILY_native are options for its NATIVE operations.
function(anyflash_cuda_archs archs)
  anyflash_requested_archs(requested)
  set(names "")
  set(families "")
  get_property(all_families GLOBAL PROPERTY ANYFLASH_FAMILIES)
  foreach(family IN LISTS all_families)
    get_property(pattern GLOBAL PROPERTY ANYFLASH_${family}_ARCHS)
    get_property(front_end GLOBAL PROPERTY ANYFLASH_${family}_VIRTUAL)
    get_property(native GLOBAL PROPERTY ANYFLASH_${family}_NATIVE)
    anyflash_gencode(options "${requested}" "${pattern}" ${front_end})
    if(options)
      list(APPEND families ${family})
      list(APPEND names ${options_NAMES})
      set(${archs}_${family} "${options}" PARENT_SCOPE)
      # A GPU whose number is not requested, but its own architecture, gets code for that.
      foreach(arch IN LISTS requested)
        string(REGEX MATCH "^([0-9]+)[a-z]" of_one "${arch}")
        if(of_one AND NOT requested MATCHES "(^|;)${CMAKE_MATCH_1}(-real)?(;|$)")
          string(APPEND pattern "|^${of_one}$")
        endif()
      endforeach()
      anyflash_gencode(options "${requested}" "${pattern}" "${front_end};${native}")
      set(${archs}_${family}_native "${options}" PARENT_SCOPE)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES names)
  message(STATUS "anyflash: GPU code ${names}, kernels of ${families}")
  set(${archs} ${names} PARENT_SCOPE)
  set(${archs}_FAMILIES ${families} PARENT_SCOPE)
endfunction()

# nvcc takes up to 5 GB a job: as many jobs as memory holds. Pools are Ninja's.
function(anyflash_define_nvcc_pool)
  if(NOT CMAKE_GENERATOR MATCHES "Ninja")
    message(
      STATUS
      "anyflash: ${CMAKE_GENERATOR} does not limit the jobs of nvcc, which take up to 5 GB each; "
      "cmake -G Ninja does"
    )
  endif()
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY) # MiB
  math(EXPR jobs "${memory} / 5120")
  if(jobs LESS 1)
    set(jobs 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS anyflash_nvcc=${jobs})
endfunction()

# Compiles a target's CUDA sources with these -gencode options.
function(anyflash_compile_cuda target gencode_options)
  target_include_directories(${target} SYSTEM PRIVATE "${ANYFLASH_CUTLASS_INCLUDE_DIR}")
  target_compile_options(
    ${target}
    PRIVATE
      # -ftz: exp2 is one MUFU instead of four instructions; denormal probabilities become 0.
      "$<$<COMPILE_LANGUAGE:CUDA>:${gencode_options};-ftz=true;--expt-relaxed-constexpr>"
  )
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF JOB_POOL_COMPILE anyflash_nvcc)
endfunction()
