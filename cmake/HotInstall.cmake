# Install rules of libhot (HOT_INSTALL): library, headers, CMake package and pkg-config file.

set(hot_built_archs "")
if(HOT_CUDA_BUILT)
  set(hot_built_archs "${CMAKE_CUDA_ARCHITECTURES}")
endif()
set(hot_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hotcore")
set(hot_namelink "")
if(SKBUILD)  # a wheel holds no symbolic links
  set(hot_namelink NAMELINK_SKIP)
endif()
install(TARGETS hot EXPORT hotcoreTargets
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT devel ${hot_namelink}
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT devel)
install(DIRECTORY cpp/include/hot DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT devel)
install(EXPORT hotcoreTargets NAMESPACE hotcore:: DESTINATION "${hot_cmake_dir}" COMPONENT devel)
configure_package_config_file(cmake/hotcoreConfig.cmake.in
  "${CMAKE_CURRENT_BINARY_DIR}/hotcoreConfig.cmake" INSTALL_DESTINATION "${hot_cmake_dir}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/hotcoreConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${CMAKE_CURRENT_BINARY_DIR}/hotcoreConfig.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/hotcoreConfigVersion.cmake"
  DESTINATION "${hot_cmake_dir}" COMPONENT devel)

# hotcore.pc. Its prefix is relative to its own place, so that an installed tree can be moved.
set(hot_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH hot_pc_up "/prefix/${hot_pc_dir}" "/prefix")
string(REGEX REPLACE "/$" "" hot_pc_up "${hot_pc_up}")
set(hot_pc_cflags "")
set(hot_pc_libs "-lhot")
if(SKBUILD)  # there is no libhot.so
  set(hot_pc_libs "-l:$<TARGET_FILE_NAME:hot>")
endif()
if(NOT HOT_SHARED)
  # Libraries for a program that links a static libhot: pkg-config knows no C++ linker.
  set(hot_pc_cflags " -DHOT_STATIC")
  string(APPEND hot_pc_libs " -lstdc++ -lm -lpthread")
  if(HOT_CUDA_BUILT)
    get_target_property(hot_cudart CUDA::cudart_static IMPORTED_LOCATION)
    string(APPEND hot_pc_libs " ${hot_cudart} -lrt -ldl")
  endif()
endif()
configure_file(cmake/hotcore.pc.in "${CMAKE_CURRENT_BINARY_DIR}/hotcore.pc.in" @ONLY)
file(GENERATE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/pkgconfig/hotcore.pc"
  INPUT "${CMAKE_CURRENT_BINARY_DIR}/hotcore.pc.in")
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/pkgconfig/hotcore.pc" DESTINATION "${hot_pc_dir}" COMPONENT devel)
