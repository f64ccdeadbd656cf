// Extension module hotcore._core: converts arguments to views and calls libhot.
#include <exception>

#include "views.h"

namespace {

void translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const hot::Error& error) {
    PyObject* type = PyExc_RuntimeError;  // workspace_too_small, cuda
    if (error.code() == hot::ErrorCode::invalid_argument) type = PyExc_ValueError;
    if (error.code() == hot::ErrorCode::unsupported) type = PyExc_NotImplementedError;
    PyErr_SetString(type, error.what());
  }
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "libhot over DLPack: every function writes into arrays that the caller passes.";
  // Caches intentionally keep specs and contexts until the process ends.
  nanobind::set_leak_warnings(false);
  nanobind::register_exception_translator(translate);
  hotpy::bind_ops(module);
  hotpy::bind_torch_ops(module);
}
