# HOT_CUDA=AUTO|ON|OFF. Sets HOT_CUDA_BUILT. If it is ON, also sets the compiler and the
# architectures for HotCudaLanguage.cmake.
#
# AUTO builds the CUDA backend if there is a CUDA compiler. A GPU without a compiler, or a compiler
# that fails, is an error that names the option to continue. (pip hides the warnings of a build that
# succeeds.) Without any sign of CUDA, AUTO silently builds for the CPU.

set(HOT_CUDA AUTO CACHE STRING "CUDA backend: AUTO (if a CUDA compiler is found), ON or OFF")
set_property(CACHE HOT_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT HOT_CUDA MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0|on|off|true|false)$")
  message(FATAL_ERROR "HOT_CUDA is ${HOT_CUDA}; expected AUTO, ON or OFF")
endif()

set(hot_cuda_minimum 12.0)
set(hot_cuda_go_on "to build for the CPU alone, set HOT_CUDA=OFF: \"HOT_CUDA=OFF pip install ...\" or \
\"cmake -DHOT_CUDA=OFF ...\"")

include("${CMAKE_CURRENT_LIST_DIR}/HotCudaFind.cmake")

set(HOT_CUDA_BUILT OFF)
set(hot_cuda_why "HOT_CUDA=${HOT_CUDA}")
set(hot_archs_why "from CMAKE_CUDA_ARCHITECTURES or CUDAARCHS")  # for HotSummary.cmake
if(HOT_CUDA STREQUAL "AUTO" OR HOT_CUDA)
  hot_find_cuda_compiler(hot_nvcc hot_nvcc_from)
  hot_find_gpus(hot_gpu_capabilities hot_gpu_sign)
  if(NOT hot_nvcc)
    set(hot_cuda_why "no CUDA compiler: looked in ${hot_nvcc_from}")
    if(hot_gpu_sign AND HOT_CUDA STREQUAL "AUTO")
      message(FATAL_ERROR "hotcore: this machine has a GPU (${hot_gpu_sign}), but ${hot_cuda_why}. "
        "Install the CUDA toolkit ${hot_cuda_minimum} or newer, or set CUDA_HOME or CUDACXX; "
        "${hot_cuda_go_on}")
    endif()
  else()
    if(NOT CMAKE_CUDA_COMPILER)  # check_language is slower and hides the reason of a failure
      get_filename_component(hot_program "${hot_nvcc}" PROGRAM PROGRAM_ARGS hot_nvcc_options)
      if(hot_program)  # CUDACXX may have options
        set(hot_nvcc "${hot_program}")
      endif()
      separate_arguments(hot_nvcc_options UNIX_COMMAND
        "${hot_nvcc_options} $ENV{CUDAFLAGS} ${CMAKE_CUDA_FLAGS}")
      set(hot_ccbin "${CMAKE_CUDA_HOST_COMPILER}")
      if(NOT hot_ccbin)
        set(hot_ccbin "$ENV{CUDAHOSTCXX}")
      endif()
      if(hot_ccbin)
        list(APPEND hot_nvcc_options -ccbin "${hot_ccbin}")
      endif()
      set(hot_probe "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/hot_cuda_probe")
      file(WRITE "${hot_probe}.cu" "__global__ void kernel() {}\nint main() { return 0; }\n")
      execute_process(COMMAND "${hot_nvcc}" ${hot_nvcc_options} -c "${hot_probe}.cu" -o "${hot_probe}.o"
        OUTPUT_VARIABLE hot_said ERROR_VARIABLE hot_said RESULT_VARIABLE hot_probe_result)
      if(NOT hot_probe_result EQUAL 0)
        string(STRIP "${hot_said}" hot_said)
        message(FATAL_ERROR "hotcore: the CUDA compiler ${hot_nvcc} (from ${hot_nvcc_from}) cannot "
          "compile a program (${hot_probe_result}): ${hot_said}\nRepair or replace it (CUDACXX, "
          "CUDA_HOME; the host compiler: CUDAHOSTCXX), or, ${hot_cuda_go_on}")
      endif()
      if(NOT hot_nvcc_from STREQUAL "CUDACXX")
        set(CMAKE_CUDA_COMPILER "${hot_nvcc}")
      endif()
    endif()
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
      set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}" CACHE STRING "CUDA architectures")
    elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      hot_choose_archs("${hot_nvcc}" "${hot_gpu_capabilities}" hot_archs hot_archs_why)
      if(NOT hot_archs)
        message(FATAL_ERROR "hotcore: ${hot_archs_why}. To build for others, set "
          "CUDAARCHS=\"${hot_release_archs}\"; ${hot_cuda_go_on}")
      endif()
      set(CMAKE_CUDA_ARCHITECTURES "${hot_archs}")
      message(STATUS "hotcore: CUDA architectures chosen: ${hot_archs} (${hot_archs_why})")
    endif()
    set(HOT_CUDA_BUILT ON)
    if(CMAKE_CUDA_ARCHITECTURES MATCHES "^(native|all|all-major)$")
      include(HotCudaLanguage)  # resolves the name
    endif()
  endif()
  if(NOT HOT_CUDA_BUILT AND NOT HOT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HOT_CUDA=${HOT_CUDA}, but: ${hot_cuda_why}")
  endif()
endif()
if(NOT HOT_CUDA_BUILT)
  message(STATUS "hotcore: CUDA backend OFF (${hot_cuda_why})")
endif()
