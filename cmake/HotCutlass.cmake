# HOT_CUTLASS=AUTO|ON|OFF: the CUTLASS headers as the interface target hot_cutlass. Nothing of them
# is in this repository (third_party/README.md). Looked for in HOT_CUTLASS_DIR, then in
# third_party/cutlass; ON fetches them into third_party/cutlass if they are in neither, AUTO goes
# on without them and without the kernels that need them. Sets HOT_CUTLASS_FOUND.

set(HOT_CUTLASS AUTO CACHE STRING "CUTLASS headers: AUTO (if they are there), ON (fetch), OFF")
set_property(CACHE HOT_CUTLASS PROPERTY STRINGS AUTO ON OFF)
set(HOT_CUTLASS_DIR "" CACHE PATH "A CUTLASS tree: the folder that holds include/cutlass")
set(hot_cutlass_minimum 4.2.0)

set(HOT_CUTLASS_FOUND OFF)
if(HOT_CUDA_BUILT AND (HOT_CUTLASS STREQUAL "AUTO" OR HOT_CUTLASS))
  set(hot_cutlass_dir "${CMAKE_CURRENT_SOURCE_DIR}/third_party/cutlass")
  if(HOT_CUTLASS_DIR)
    set(hot_cutlass_dir "${HOT_CUTLASS_DIR}")
  elseif(NOT HOT_CUTLASS STREQUAL "AUTO" AND NOT EXISTS "${hot_cutlass_dir}/include")
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_cutlass.py"
      RESULT_VARIABLE hot_fetch_result)
    if(hot_fetch_result)
      message(FATAL_ERROR "HOT_CUTLASS=ON: the headers could not be fetched; run "
        "scripts/fetch_cutlass.py where there is a network, or set HOT_CUTLASS_DIR")
    endif()
  endif()

  set(hot_cutlass_version_file "${hot_cutlass_dir}/include/cutlass/version.h")
  if(EXISTS "${hot_cutlass_version_file}")
    set(hot_cutlass_version "")
    foreach(part MAJOR MINOR PATCH)
      file(STRINGS "${hot_cutlass_version_file}" line REGEX "^#define CUTLASS_${part} +[0-9]+")
      string(REGEX REPLACE "^[^0-9]+([0-9]+).*$" "\\1" number "${line}")
      list(APPEND hot_cutlass_version "${number}")
    endforeach()
    list(JOIN hot_cutlass_version "." hot_cutlass_version)
    if(hot_cutlass_version VERSION_LESS hot_cutlass_minimum)
      message(FATAL_ERROR "CUTLASS ${hot_cutlass_version} in ${hot_cutlass_dir}; "
        "${hot_cutlass_minimum} or newer is needed")
    endif()
    add_library(hot_cutlass INTERFACE)
    target_include_directories(hot_cutlass SYSTEM INTERFACE
      "${hot_cutlass_dir}/include" "${hot_cutlass_dir}/tools/util/include")
    # CUTLASS reads through unions of unrelated types.
    target_compile_options(hot_cutlass INTERFACE
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-strict-aliasing>)
    set(HOT_CUTLASS_FOUND ON)
    message(STATUS "hotcore: CUTLASS ${hot_cutlass_version} in ${hot_cutlass_dir}")
  elseif(HOT_CUTLASS_DIR)
    message(FATAL_ERROR "HOT_CUTLASS_DIR is ${HOT_CUTLASS_DIR}; it holds no include/cutlass/version.h")
  else()
    message(STATUS "hotcore: no CUTLASS headers (scripts/fetch_cutlass.py gets them)")
  endif()
endif()
