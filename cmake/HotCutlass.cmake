# HOT_CUTLASS=AUTO|ON|OFF: the CUTLASS headers as the interface target hot_cutlass. The repository
# does not contain them (third_party/README.md). They are searched in HOT_CUTLASS_DIR, then in
# third_party/cutlass. If missing, they are fetched into third_party/cutlass. A failed fetch stops
# the build, because an H100 would silently run slower kernels without them. AUTO fetches only for
# the architecture 90a, which needs them, ON for any, OFF never. Sets HOT_CUTLASS_FOUND, and
# HOT_WGMMA_BUILT if the wgmma kernels are built.

set(HOT_CUTLASS AUTO CACHE STRING
  "CUTLASS headers: AUTO (found or fetched for sm_90a), ON (for any architecture), OFF")
set_property(CACHE HOT_CUTLASS PROPERTY STRINGS AUTO ON OFF)
set(HOT_CUTLASS_DIR "" CACHE PATH "A CUTLASS tree: the folder that holds include/cutlass")
set(hot_cutlass_minimum 4.2.0)

set(HOT_CUTLASS_FOUND OFF)
set(HOT_WGMMA_BUILT OFF)
set(hot_wgmma_why "HOT_CUTLASS=${HOT_CUTLASS}")
if(HOT_CUDA_BUILT AND HOT_CUTLASS STREQUAL "AUTO" AND NOT CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
  set(hot_wgmma_why "90a is not among the architectures")
elseif(HOT_CUDA_BUILT AND (HOT_CUTLASS STREQUAL "AUTO" OR HOT_CUTLASS))
  set(hot_cutlass_dir "${CMAKE_CURRENT_SOURCE_DIR}/third_party/cutlass")
  if(HOT_CUTLASS_DIR)
    set(hot_cutlass_dir "${HOT_CUTLASS_DIR}")
  elseif(NOT EXISTS "${hot_cutlass_dir}/include/cutlass/version.h")
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    message(STATUS "hotcore: fetching the CUTLASS headers")
    set(hot_fetch "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_cutlass.py")
    execute_process(COMMAND "${Python3_EXECUTABLE}" "${hot_fetch}"
      RESULT_VARIABLE hot_fetch_result OUTPUT_VARIABLE hot_fetch_said ERROR_VARIABLE hot_fetch_said)
    if(NOT hot_fetch_result EQUAL 0)
      message(FATAL_ERROR "hotcore: the kernels for sm_90a need the CUTLASS headers, and these could "
        "not be fetched:\n${hot_fetch_said}\nWhere there is a network, run\n"
        "  python3 ${hot_fetch}\n(--wheel FILE takes a wheel that was brought here), or set "
        "HOT_CUTLASS_DIR. To go on without them, with slower products on an H100 or H200, set "
        "HOT_CUTLASS=OFF: \"HOT_CUTLASS=OFF pip install ...\" or \"cmake -DHOT_CUTLASS=OFF ...\"")
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
  else()
    message(FATAL_ERROR "HOT_CUTLASS_DIR is ${HOT_CUTLASS_DIR}; it holds no include/cutlass/version.h")
  endif()
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
    set(HOT_WGMMA_BUILT ON)
  else()
    set(hot_wgmma_why "90a is not among the architectures")
  endif()
endif()
if(HOT_WGMMA_BUILT)
  message(STATUS "hotcore: wgmma kernels (sm_90a) ON")
elseif(HOT_CUDA_BUILT)
  message(STATUS "hotcore: wgmma kernels (sm_90a) OFF (${hot_wgmma_why})")
endif()
