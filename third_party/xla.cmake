# XLA's FFI headers, which the handlers for JAX are built with.
#
#   ANYFLASH_JAX               AUTO (default): build the handlers if the headers can be had. ON: they
#                              must be. OFF: none.
#   ANYFLASH_XLA_INCLUDE_DIR   holds xla/ffi/api/ffi.h, of API 0.1. Default: those of an installed
#                              jaxlib 0.6.2, else pip downloads them into the build folder.

set(ANYFLASH_JAX AUTO CACHE STRING "Build XLA handlers for JAX: AUTO, ON or OFF")
set_property(CACHE ANYFLASH_JAX PROPERTY STRINGS AUTO ON OFF)

# Sets ${output} to ON if ${folder} holds headers that all versions of jaxlib from 0.6.2 on accept.
function(anyflash_check_xla_headers output folder)
  set(${output} OFF PARENT_SCOPE)
  if(EXISTS "${folder}/xla/ffi/api/c_api.h")
    file(STRINGS "${folder}/xla/ffi/api/c_api.h" lines REGEX "define XLA_FFI_API_M(AJ|IN)OR ")
    if("${lines}" MATCHES "MAJOR 0" AND "${lines}" MATCHES "MINOR 1$")
      set(${output} ON PARENT_SCOPE)
    endif()
  endif()
endfunction()

# The wheel is 90 MB; of it three headers are kept. They are the same for every system and Python.
function(anyflash_download_xla_headers folder)
  set(download "${folder}/download")
  message(STATUS "anyflash: downloading jaxlib 0.6.2 for XLA's headers")
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -m pip --disable-pip-version-check download --quiet --no-deps
      --only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 --platform
      manylinux2014_x86_64 --retries 1 --dest "${download}" -r
      "${PROJECT_SOURCE_DIR}/third_party/requirements-xla.txt"
    RESULT_VARIABLE failed
    OUTPUT_QUIET
    ERROR_QUIET
  )
  file(GLOB wheel "${download}/*.whl")
  if(NOT failed AND wheel)
    file(
      ARCHIVE_EXTRACT
      INPUT "${wheel}"
      DESTINATION "${folder}"
      PATTERNS "jaxlib/include/xla/ffi/api/*"
    )
  endif()
  file(REMOVE_RECURSE "${download}")
endfunction()

# Sets ANYFLASH_HAS_XLA, and ANYFLASH_XLA_INCLUDE_DIR with it.
macro(anyflash_setup_xla)
  set(ANYFLASH_HAS_XLA OFF)
  set(xla_downloaded "${CMAKE_BINARY_DIR}/xla/jaxlib/include")
  if(ANYFLASH_JAX AND ANYFLASH_XLA_INCLUDE_DIR)
    anyflash_check_xla_headers(ANYFLASH_HAS_XLA "${ANYFLASH_XLA_INCLUDE_DIR}")
    if(NOT ANYFLASH_HAS_XLA)
      message(
        FATAL_ERROR
        "ANYFLASH_XLA_INCLUDE_DIR is ${ANYFLASH_XLA_INCLUDE_DIR}, which does not hold "
        "xla/ffi/api/ffi.h of XLA's FFI API 0.1, as the package jaxlib 0.6.2 has it"
      )
    endif()
  elseif(ANYFLASH_JAX)
    set(xla_installed "")
    anyflash_find_in_package(xla_installed jaxlib include xla/ffi/api/ffi.h)
    if(NOT EXISTS "${xla_downloaded}")
      anyflash_check_xla_headers(ANYFLASH_HAS_XLA "${xla_installed}")
      if(NOT ANYFLASH_HAS_XLA)
        anyflash_download_xla_headers("${CMAKE_BINARY_DIR}/xla")
      endif()
    endif()
    foreach(folder IN ITEMS "${xla_downloaded}" "${xla_installed}")
      anyflash_check_xla_headers(ANYFLASH_HAS_XLA "${folder}")
      if(ANYFLASH_HAS_XLA)
        set(ANYFLASH_XLA_INCLUDE_DIR "${folder}")
        break()
      endif()
    endforeach()
    if(NOT ANYFLASH_HAS_XLA AND NOT ANYFLASH_JAX STREQUAL "AUTO")
      message(
        FATAL_ERROR
        "ANYFLASH_JAX is ON, but XLA's headers could not be downloaded; set "
        "ANYFLASH_XLA_INCLUDE_DIR to jaxlib/include of the package jaxlib 0.6.2"
      )
    endif()
  endif()
  if(ANYFLASH_HAS_XLA)
    message(STATUS "anyflash: XLA handlers for JAX with ${ANYFLASH_XLA_INCLUDE_DIR}")
  elseif(ANYFLASH_JAX)
    message(
      STATUS
      "anyflash: no XLA handlers, and so no anyflash.jax: XLA's headers could not be downloaded "
      "(ANYFLASH_XLA_INCLUDE_DIR names a folder)"
    )
  else()
    message(STATUS "anyflash: no XLA handlers for JAX (ANYFLASH_JAX=${ANYFLASH_JAX})")
  endif()
endmacro()
