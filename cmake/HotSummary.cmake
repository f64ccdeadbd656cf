# Prints a summary before the build starts: contents, duration and switches. The output of a build
# that succeeds is hidden by pip. Therefore a build by pip also writes to the terminal, if there is
# one, and reports its progress there.

# Seconds on a fast core (GCC 12, nvcc 13.0). CPU: the backend with the Python module. Arch: the CUDA
# files for one architecture (machine code or PTX). Slow or shared cores take up to four times as
# long.
set(hot_seconds_cpu 60)
set(hot_seconds_arch 75)
set(hot_seconds_wgmma 150)

# Sets the text for HOT_CUDA_BUILT, HOT_WGMMA_BUILT, CMAKE_CUDA_ARCHITECTURES, and their reasons
# hot_cuda_why, hot_archs_why, hot_wgmma_why.
function(hot_build_summary text cores)
  set(seconds ${hot_seconds_cpu})
  if(HOT_CUDA_BUILT)
    list(JOIN CMAKE_CUDA_ARCHITECTURES ", " archs)
    foreach(arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
      math(EXPR seconds "${seconds} + ${hot_seconds_arch}")
      if(NOT arch MATCHES "-")  # CMake's short form for machine code and PTX
        math(EXPR seconds "${seconds} + ${hot_seconds_arch}")
      endif()
    endforeach()
    set(wgmma "Without the wgmma kernels (${hot_wgmma_why})")
    if(HOT_WGMMA_BUILT)
      math(EXPR seconds "${seconds} + ${hot_seconds_wgmma}")
      set(wgmma "With the wgmma kernels")
    endif()
    set(what "the CPU and CUDA. Architectures: ${archs} (${hot_archs_why}). ${wgmma}")
    set(switch "CUDAARCHS=90a-real is for an H100 or H200, 86-real, 89-real, 100-real and 120-real are \
    for other GPUs, CUDAARCHS=\"${hot_release_archs}\" is for all. HOT_CUDA=OFF leaves CUDA out")
  else()
    set(what "the CPU alone (${hot_cuda_why})")
    set(switch "HOT_CUDA=ON stops the build if CUDA cannot be built")
  endif()
  math(EXPR least "(${seconds} / ${cores} + 59) / 60")
  math(EXPR most "(4 * ${seconds} / ${cores} + 59) / 60")
  set(on "${cores} cores")
  if(cores EQUAL 1)
    set(on "one core")
  endif()
  set(${text} "hotcore: building for ${what}. This takes ${least} to ${most} minutes on ${on}. To change it: \
${switch} (docs/quickstart.md)." PARENT_SCOPE)
endfunction()

# Writes to the terminal, by sh, because CMake cannot open it. Ignoring TTOU keeps a build in the
# background from being stopped. Without a terminal nothing is written.
function(hot_tell_terminal text)
  execute_process(
    COMMAND sh -c "trap '' TTOU; printf '\\n%s\\n' \"$1\" > /dev/tty" sh "${text}"
    OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE ignored TIMEOUT 5)
endfunction()

cmake_host_system_information(RESULT hot_cores QUERY NUMBER_OF_LOGICAL_CORES)
hot_build_summary(hot_summary ${hot_cores})
message(STATUS "${hot_summary}")
if(SKBUILD)
  hot_tell_terminal("${hot_summary}")
  if(UNIX AND CMAKE_GENERATOR STREQUAL "Ninja")
    file(REMOVE "${CMAKE_BINARY_DIR}/compiled")
    # Set even without a terminal: another command would compile every file again.
    set_property(GLOBAL PROPERTY RULE_LAUNCH_COMPILE "sh \"${CMAKE_CURRENT_LIST_DIR}/progress.sh\"")
  endif()
endif()
