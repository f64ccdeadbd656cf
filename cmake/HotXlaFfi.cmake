# HOT_JAX=AUTO|ON|OFF: XLA's foreign function interface for hotcore.jax, three headers, as the
# interface target hot_xla_ffi. The repository does not contain them (third_party/README.md). They
# are searched in HOT_XLA_FFI_DIR, then in third_party/xla_ffi. If missing, ON fetches them into
# third_party/xla_ffi, and AUTO builds without hotcore.jax.

set(HOT_JAX AUTO CACHE STRING "hotcore.jax: AUTO (if XLA's headers are there), ON (fetch), OFF")
set_property(CACHE HOT_JAX PROPERTY STRINGS AUTO ON OFF)
set(HOT_XLA_FFI_DIR "" CACHE PATH "The folder that holds xla/ffi/api, as jax.ffi.include_dir()")

set(hot_jax_how "python3 scripts/fetch_xla_ffi.py gets XLA's headers")
if(HOT_JAX STREQUAL "AUTO" OR HOT_JAX)
  set(hot_xla_ffi_dir "${CMAKE_CURRENT_SOURCE_DIR}/third_party/xla_ffi")
  if(HOT_XLA_FFI_DIR)
    set(hot_xla_ffi_dir "${HOT_XLA_FFI_DIR}")
  elseif(NOT HOT_JAX STREQUAL "AUTO" AND NOT EXISTS "${hot_xla_ffi_dir}/xla")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_xla_ffi.py"
      RESULT_VARIABLE hot_fetch_result)
    if(hot_fetch_result)
      message(FATAL_ERROR "HOT_JAX=ON: XLA's headers could not be fetched; run "
        "scripts/fetch_xla_ffi.py where there is a network, or set HOT_XLA_FFI_DIR")
    endif()
  endif()

  if(EXISTS "${hot_xla_ffi_dir}/xla/ffi/api/ffi.h")
    add_library(hot_xla_ffi INTERFACE)
    target_include_directories(hot_xla_ffi SYSTEM INTERFACE "${hot_xla_ffi_dir}")
    message(STATUS "hotcore: hotcore.jax ON, XLA's headers in ${hot_xla_ffi_dir}")
  elseif(HOT_XLA_FFI_DIR)
    message(FATAL_ERROR "HOT_XLA_FFI_DIR is ${HOT_XLA_FFI_DIR}; it holds no xla/ffi/api/ffi.h")
  else()
    message(STATUS "hotcore: hotcore.jax OFF (${hot_jax_how})")
  endif()
else()
  message(STATUS "hotcore: hotcore.jax OFF (HOT_JAX=${HOT_JAX})")
endif()
