# cmake -P, called by ctest (tests/cpp/CMakeLists.txt): installs hotcore as a `kind` library, moves the
# tree (an installation must not depend on where it was made), builds the consumer on it, runs it.
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "failed: ${ARGV}")
  endif()
endfunction()

file(REMOVE_RECURSE "${work}")
set(common -G "${generator}" "-DCMAKE_MAKE_PROGRAM=${make_program}"
  "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}"
  -DCMAKE_BUILD_TYPE=Release)

set(is_shared OFF)
if(kind STREQUAL "shared")
  set(is_shared ON)
endif()

if((is_shared AND built_shared) OR (NOT is_shared AND NOT built_shared))
  run("${CMAKE_COMMAND}" --install "${build}" --prefix "${work}/first" --component devel)
else()
  # The other kind is built as part of the consumer, which tries add_subdirectory as well. Without
  # CUDA: its kernels take minutes, and the linker treats them like any other object.
  set(tree "${work}/subdirectory")
  run("${CMAKE_COMMAND}" ${common} -S "${source}/tests/consumer" -B "${tree}"
    -DHOTCORE_AS_SUBDIRECTORY=ON "-DBUILD_SHARED_LIBS=${is_shared}" "-DHOT_WERROR=${werror}" -DHOT_CUDA=OFF)
  run("${CMAKE_COMMAND}" --build "${tree}")
  run("${tree}/consumer")
  run("${CMAKE_COMMAND}" --install "${tree}" --prefix "${work}/first" --component devel)
endif()
file(RENAME "${work}/first" "${work}/installed")

run("${CMAKE_COMMAND}" ${common} -S "${source}/tests/consumer" -B "${work}/consumer"
  "-DCMAKE_PREFIX_PATH=${work}/installed")
run("${CMAKE_COMMAND}" --build "${work}/consumer")
run("${work}/consumer/consumer")
