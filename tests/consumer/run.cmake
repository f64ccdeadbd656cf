# Script for cmake -P, called by ctest (tests/cpp/CMakeLists.txt). It installs hotcore as a `kind`
# library and moves the tree, because an installation must not depend on its place. Then it builds
# the consumer by find_package and by pkg-config, and runs it.
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "failed: ${ARGV}")
  endif()
endfunction()

function(run_programs folder)
  run("${folder}/consumer")
  run("${folder}/consumer_c")
endfunction()

file(REMOVE_RECURSE "${work}")
set(common -G "${generator}" "-DCMAKE_MAKE_PROGRAM=${make_program}"
  "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}"
  -DCMAKE_BUILD_TYPE=Release)

set(is_shared OFF)
set(target_type STATIC_LIBRARY)
if(kind STREQUAL "shared")
  set(is_shared ON)
  set(target_type SHARED_LIBRARY)
endif()

if((is_shared AND built_shared) OR (NOT is_shared AND NOT built_shared))
  run("${CMAKE_COMMAND}" --install "${build}" --prefix "${work}/first" --component devel)

  # Inside another project, whose installation must not include hotcore.
  set(tree "${work}/fetched")
  run("${CMAKE_COMMAND}" ${common} -S "${source}/tests/consumer" -B "${tree}"
    -DHOTCORE_FROM=fetch -DHOT_CUDA=OFF)
  run("${CMAKE_COMMAND}" --install "${tree}" --prefix "${work}/nothing")
  if(EXISTS "${work}/nothing")
    message(FATAL_ERROR "a project that fetches hotcore installs it")
  endif()
else()
  # Builds the other kind inside the consumer, which also tests add_subdirectory. Without CUDA, whose
  # kernels take minutes: tests/gpu/test_cpp.py builds them.
  set(tree "${work}/subdirectory")
  run("${CMAKE_COMMAND}" ${common} -S "${source}/tests/consumer" -B "${tree}"
    -DHOTCORE_FROM=subdirectory "-DHOT_SHARED=${is_shared}" -DHOT_INSTALL=ON
    "-DHOT_WERROR=${werror}" -DHOT_CUDA=OFF)
  run("${CMAKE_COMMAND}" --build "${tree}")
  run_programs("${tree}")
  run("${CMAKE_COMMAND}" --install "${tree}" --prefix "${work}/first" --component devel)
endif()
file(RENAME "${work}/first" "${work}/installed")

run("${CMAKE_COMMAND}" ${common} -S "${source}/tests/consumer" -B "${work}/consumer"
  "-DCMAKE_PREFIX_PATH=${work}/installed" "-DEXPECTED_KIND=${target_type}")
run("${CMAKE_COMMAND}" --build "${work}/consumer")
run_programs("${work}/consumer")

find_program(pkg_config NAMES pkg-config pkgconf)
if(NOT pkg_config)
  message(STATUS "no pkg-config: hotcore.pc is not tried")
  return()
endif()
file(GLOB_RECURSE pc "${work}/installed/hotcore.pc")
cmake_path(GET pc PARENT_PATH pc_folder)
cmake_path(GET pc_folder PARENT_PATH lib_folder)
set(ENV{PKG_CONFIG_PATH} "${pc_folder}")
execute_process(COMMAND "${pkg_config}" --cflags --libs hotcore
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
set(ENV{LD_LIBRARY_PATH} "${lib_folder}")  # pkg-config knows no rpath
file(MAKE_DIRECTORY "${work}/pkgconfig")
run("${compiler}" -std=c++17 "${source}/tests/consumer/main.cpp" -o "${work}/pkgconfig/consumer" ${flags})
run("${compiler}" -x c -std=c99 -Wall -Wextra -Werror -pedantic "${source}/tests/consumer/main.c"
  -o "${work}/pkgconfig/consumer_c" ${flags} -lm)
run_programs("${work}/pkgconfig")
