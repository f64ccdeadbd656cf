# The extension module hotcore._core, built by scikit-build-core. The install prefix is the package
# directory, and libhot is in its lib/.

find_package(Python 3.10 QUIET
  COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS Development.SABIModule)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "hotcore: no Python 3.10 or newer was found (HOT_BUILD_PYTHON=ON). Debian, "
    "Ubuntu: apt-get install python3; Fedora, RHEL: dnf install python3. Another one: "
    "-DPython_EXECUTABLE=/path/to/python")
endif()
if(NOT Python_Development.Module_FOUND)
  set(hot_python "${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}")
  message(FATAL_ERROR "hotcore: the headers of Python ${Python_VERSION} (${Python_EXECUTABLE}) are "
    "missing: there is no Python.h. Debian, Ubuntu: apt-get install python${hot_python}-dev (or "
    "python3-dev); Fedora, RHEL: dnf install python3-devel")
endif()
if(NOT nanobind_ROOT)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind CONFIG REQUIRED)

# hot_python_module(NAME SOURCE...). STABLE_ABI: one binary for Python 3.12 and newer. Older versions
# need one each.
function(hot_python_module name)
  nanobind_add_module(${name} STABLE_ABI NB_STATIC NB_DOMAIN hotcore ${ARGN})
  target_link_libraries(${name} PRIVATE hotcore::hot)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/cpp/src")  # config_fields.h
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${HOT_WERROR}>:-Werror>)
  # Otherwise the module names libhot only, and auditwheel cannot determine its C library.
  target_link_options(${name} PRIVATE -Wl,--no-as-needed)
  if(UNIX AND NOT APPLE)
    target_link_options(${name} PRIVATE
      "LINKER:--version-script=${CMAKE_CURRENT_FUNCTION_LIST_DIR}/module.map")
  endif()
  # Sets the final path at link time. A path rewritten at the install would make builds differ.
  set_target_properties(${name} PROPERTIES
    INSTALL_RPATH "$ORIGIN/${CMAKE_INSTALL_LIBDIR}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${name} LIBRARY DESTINATION . COMPONENT python)
endfunction()

hot_python_module(_core
  python/bindings/module.cpp
  python/bindings/ops.cpp
  python/bindings/torch_ops.cpp
  python/bindings/views.cpp)
target_link_libraries(_core PRIVATE ${CMAKE_DL_LIBS})  # dlsym
# Types for editors and mypy, of the installed module: there it finds libhot.
nanobind_add_stub(_core_stub INSTALL_TIME MODULE _core OUTPUT _core.pyi PYTHON_PATH .
  COMPONENT python)

include(HotXlaFfi)  # HOT_JAX -> target hot_xla_ffi
if(TARGET hot_xla_ffi)
  hot_python_module(_jax_ffi
    python/bindings/jax_ffi.cpp
    python/bindings/views.cpp)
  target_link_libraries(_jax_ffi PRIVATE hot_xla_ffi)
endif()
