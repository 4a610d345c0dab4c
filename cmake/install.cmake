# What a user of the library finds: headers with DLPack's, the library, CMake's and pkg-config's
# files. All paths are relative to where the files lie, so that the folder can be moved; the wheel is
# such a folder. Folders that were given as absolute paths stay what they are.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
set(config_folder "${CMAKE_INSTALL_LIBDIR}/cmake/anyflash")
set(generated "${CMAKE_CURRENT_BINARY_DIR}/install")

# One file of targets for a shared and one for a static library; anyflash-config.cmake takes one.
function(anyflash_install_library target kind)
  set_property(
    TARGET ${target}
    APPEND
    PROPERTY INTERFACE_INCLUDE_DIRECTORIES $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  )
  install(
    TARGETS ${target}
    EXPORT anyflash-${kind}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  )
  install(
    EXPORT anyflash-${kind}
    FILE anyflash-${kind}-targets.cmake
    NAMESPACE anyflash::
    DESTINATION "${config_folder}"
  )
endfunction()

if(BUILD_SHARED_LIBS)
  anyflash_install_library(anyflash shared)
else()
  anyflash_install_library(anyflash static)
endif()
if(TARGET anyflash_static)
  anyflash_install_library(anyflash_static static)
endif()

if(TARGET anyflash_tvm_ffi)
  install(TARGETS anyflash_tvm_ffi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()

install(
  DIRECTORY include/anyflash "${PROJECT_BINARY_DIR}/include/anyflash"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING
  PATTERN "*.h"
)
install(
  FILES "${ANYFLASH_DLPACK_INCLUDE_DIR}/dlpack/dlpack.h"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/dlpack
)

# A wheel has these texts among its metadata (pyproject.toml, license-files).
set(licences DLPack)
if(ANYFLASH_HAS_CUDA)
  list(APPEND licences CUDA CUTLASS)
endif()
if(ANYFLASH_HAS_STATIC_LIBSTDCXX)
  list(APPEND licences libstdc++)
endif()
list(TRANSFORM licences PREPEND "${PROJECT_SOURCE_DIR}/third_party/licenses/")
list(TRANSFORM licences APPEND .txt)
if(NOT SKBUILD)
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" ${licences} DESTINATION "${CMAKE_INSTALL_DOCDIR}")
endif()

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/anyflash-config.cmake.in"
  "${generated}/anyflash-config.cmake"
  INSTALL_DESTINATION "${config_folder}"
)
# Before 1.0 a minor version may change the C++ API.
write_basic_package_version_file(
  "${generated}/anyflash-config-version.cmake"
  COMPATIBILITY SameMinorVersion
)
install(
  FILES "${generated}/anyflash-config.cmake" "${generated}/anyflash-config-version.cmake"
  DESTINATION "${config_folder}"
)

# Static libraries do not name what they need themselves: compiler runtimes, and CUDA's.
set(pc_private -lstdc++ -lm -lpthread ${OpenMP_CXX_FLAGS})
if(ANYFLASH_HAS_CUDA)
  if(ANYFLASH_CUDART_STATIC)
    get_filename_component(cudart_folder "${ANYFLASH_CUDART_STATIC}" DIRECTORY)
    list(APPEND pc_private "-L\"${cudart_folder}\"")
  endif()
  list(APPEND pc_private -lcudart_static -lrt -ldl)
endif()
list(JOIN pc_private " " pc_private)
set(pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_libs " ${pc_private}")
endif()
set(pc_folder "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
if(IS_ABSOLUTE "${pc_folder}")
  set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH pc_prefix "/prefix/${pc_folder}" /prefix)
  string(REGEX REPLACE "/$" "" pc_prefix "\${pcfiledir}/${pc_prefix}")
endif()
foreach(folder IN ITEMS INCLUDEDIR LIBDIR)
  string(TOLOWER pc_${folder} variable)
  set(${variable} "\${prefix}/${CMAKE_INSTALL_${folder}}")
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${folder}}")
    set(${variable} "${CMAKE_INSTALL_${folder}}")
  endif()
endforeach()
configure_file("${PROJECT_SOURCE_DIR}/cmake/anyflash.pc.in" "${generated}/anyflash.pc" @ONLY)
install(FILES "${generated}/anyflash.pc" DESTINATION "${pc_folder}")
