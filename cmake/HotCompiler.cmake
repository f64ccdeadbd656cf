# Enables the language CXX. Without a compiler, or with an old one, the errors here name the package
# to install; CMake's own do not. This is no function: enable_language must run at directory scope.

set(hot_install_compiler "Debian, Ubuntu: apt-get install g++; Fedora, RHEL: dnf install gcc-c++; \
conda: conda install cxx-compiler. Another one: CXX=/path/to/compiler")
if(NOT CMAKE_CXX_COMPILER AND "$ENV{CXX}" STREQUAL "")
  find_program(hot_compiler NAMES c++ CC g++ clang++ icpx nvc++ NO_CACHE)  # CMake's candidates
  if(NOT hot_compiler)
    message(FATAL_ERROR "hotcore: no C++ compiler was found (c++, g++, clang++). "
      "${hot_install_compiler}")
  endif()
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "hotcore: GCC ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}) stops with "
  "an internal error; use GCC 11 or newer. ${hot_install_compiler}")
endif()
if(MSVC)  # cl, and clang with cl's options
  message(FATAL_ERROR "hotcore: ${CMAKE_CXX_COMPILER} takes the options of Microsoft's compiler, for which "
    "there is no build. On Windows MinGW-w64's g++ makes libhot (CPU)")
endif()
