# Enables the language CUDA and finds CUDA::cudart_static, if HOT_CUDA_BUILT. This takes seconds, so
# the summary comes before. This is no function: enable_language must run at directory scope.

include_guard()
if(NOT HOT_CUDA_BUILT)
  return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND
   CMAKE_CUDA_COMPILER_VERSION VERSION_LESS hot_cuda_minimum)
  message(FATAL_ERROR "hotcore: nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}) is "
    "older than ${hot_cuda_minimum}. Install a newer CUDA toolkit; ${hot_cuda_go_on}")
endif()
find_package(CUDAToolkit REQUIRED)
# Replaces CMake's names by numbers, which are compared with the GPU at run time.
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES_NATIVE}")
elseif(CMAKE_CUDA_ARCHITECTURES MATCHES "^all(-major)?$")
  set(hot_archs "${CMAKE_CUDA_ARCHITECTURES_ALL}")
  if(CMAKE_CUDA_ARCHITECTURES STREQUAL "all-major")
    set(hot_archs "${CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR}")
  endif()
  list(FILTER hot_archs EXCLUDE REGEX "^[1-7][0-9]([^0-9]|$)")  # too old for the kernels
  set(CMAKE_CUDA_ARCHITECTURES "${hot_archs}")
endif()
set(hot_archs ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER hot_archs INCLUDE REGEX "^[1-7][0-9]([^0-9]|$)")
if(hot_archs)
  message(FATAL_ERROR "hotcore: CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}; the "
    "kernels need 80 or newer. Set it, or CUDAARCHS, for example to native")
endif()
message(STATUS "hotcore: CUDA backend ON, ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
               "architectures ${CMAKE_CUDA_ARCHITECTURES}")
