# Where third-party headers are found. Nothing is vendored: they come from packages of the build
# environment, from its folder `headers` (pip install --target), or from a folder that a variable names.
# Pins live in pyproject.toml.
#
#   ANYFLASH_DLPACK_INCLUDE_DIR    holds dlpack/dlpack.h, DLPack 1.3     (package apache-tvm-ffi)
#   ANYFLASH_CUTLASS_INCLUDE_DIR   holds cute/ and cutlass/, CUTLASS 4.2 (package nvidia-cutlass)
#   ANYFLASH_XLA_INCLUDE_DIR       holds xla/ffi/api/ffi.h, API 0.1: xla.cmake

# Sets ${variable} to ${subfolder} of an installed Python package, if it is there.
function(anyflash_find_in_package variable package subfolder probe)
  if(${variable})
    if(NOT EXISTS "${${variable}}/${probe}")
      message(FATAL_ERROR "${variable} is ${${variable}}, which does not hold ${probe}")
    endif()
    return()
  endif()
  set(
    program
    "import importlib.util as u, sys; sys.path.append(sys.prefix + '/headers'); s = u.find_spec('${package}'); print(list(s.submodule_search_locations)[0] if s else '')"
  )
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${program}"
    OUTPUT_VARIABLE root
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
  )
  if(root AND EXISTS "${root}/${subfolder}/${probe}")
    set(${variable} "${root}/${subfolder}" PARENT_SCOPE)
  endif()
endfunction()

function(anyflash_require variable package)
  if(NOT ${variable})
    message(
      FATAL_ERROR
      "${variable} is not set and the Python package ${package} was not found. Give cmake "
      "-D${variable}=FOLDER (python/docs/guide/c_cpp.md says where its headers come from), or run: "
      "pip install --no-deps ${package}"
    )
  endif()
endfunction()

anyflash_find_in_package(ANYFLASH_DLPACK_INCLUDE_DIR tvm_ffi include dlpack/dlpack.h)
anyflash_require(ANYFLASH_DLPACK_INCLUDE_DIR apache-tvm-ffi)

# Only where kernels for a GPU, real or emulated, are compiled.
macro(anyflash_require_cutlass)
  anyflash_find_in_package(
    ANYFLASH_CUTLASS_INCLUDE_DIR
    cutlass_library
    source/include
    cute/tensor.hpp
  )
  anyflash_require(ANYFLASH_CUTLASS_INCLUDE_DIR nvidia-cutlass==4.2.0.0)
endmacro()

# Headers of a CUDA toolkit, for g++: the emulator's. ANYFLASH_CUDA_INCLUDE_DIRS overrides; else the
# system's toolkit, else the packages nvidia-cuda-runtime, -crt, -cccl.
macro(anyflash_require_cuda_headers)
  if(NOT ANYFLASH_CUDA_INCLUDE_DIRS)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import glob, sys; print(next((f for p in sys.path for f in glob.glob(p + '/nvidia/cu13/include')), ''))"
      OUTPUT_VARIABLE pypi_cuda_include
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET
    )
    find_path(
      ANYFLASH_CUDA_HEADERS
      cuda_runtime.h
      HINTS
      ENV CUDA_HOME
      ENV CUDA_PATH
      /usr/local/cuda
      PATHS "${pypi_cuda_include}"
      PATH_SUFFIXES include
    )
    set(ANYFLASH_CUDA_INCLUDE_DIRS "${ANYFLASH_CUDA_HEADERS}" "${ANYFLASH_CUDA_HEADERS}/cccl")
  endif()
  if(NOT ANYFLASH_CUDA_INCLUDE_DIRS MATCHES "/")
    message(
      FATAL_ERROR
      "No CUDA headers were found; set ANYFLASH_CUDA_INCLUDE_DIRS, or run: pip install "
      "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    )
  endif()
endmacro()
