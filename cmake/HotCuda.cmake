# HOT_CUDA=AUTO|ON|OFF. Sets HOT_CUDA_BUILT; where it is ON, enables the language CUDA and finds
# CUDAToolkit. Included, not called: enable_language must run at directory scope.

set(HOT_CUDA AUTO CACHE STRING "CUDA backend: AUTO (if a CUDA compiler is found), ON or OFF")
set_property(CACHE HOT_CUDA PROPERTY STRINGS AUTO ON OFF)

# Architectures: for development the two that differ in code, sm_80 and sm_90a. A release takes
#   80-real;86-real;89-real;90a-real;100-real;120-real;120-virtual   (preset "release")
# Elsewhere: -DCMAKE_CUDA_ARCHITECTURES=... or the environment variable CUDAARCHS.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real")
endif()

set(HOT_CUDA_BUILT OFF)
set(hot_cuda_why "HOT_CUDA=${HOT_CUDA}")
if(HOT_CUDA STREQUAL "AUTO" OR HOT_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.0)
      find_package(CUDAToolkit REQUIRED)
      set(HOT_CUDA_BUILT ON)
    else()
      set(hot_cuda_why "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.0")
    endif()
  else()
    set(hot_cuda_why "no working CUDA compiler found")
  endif()
  if(NOT HOT_CUDA_BUILT AND NOT HOT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HOT_CUDA=${HOT_CUDA}, but: ${hot_cuda_why}")
  endif()
endif()

if(HOT_CUDA_BUILT)
  message(STATUS "hotcore: CUDA backend ON, nvcc ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "architectures ${CMAKE_CUDA_ARCHITECTURES}")
else()
  message(STATUS "hotcore: CUDA backend OFF (${hot_cuda_why})")
endif()
