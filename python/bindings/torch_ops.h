// Operators of torch in C++ (torch_ops.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hot/hot.h"

namespace hotpy {

// Names of the functions of torch's C interface that torch_operators() needs. The last one exists
// only with CUDA.
std::vector<std::string> torch_symbols();
// Registers the C++ operators. `addresses` holds those functions.
void torch_operators(const std::map<std::string, std::uintptr_t>& addresses);

// Makes a configuration and a context known to the operators. `handle` is the CUDA stream of
// `device`, or the number of threads where `device` is -1.
void torch_learn(const std::string& json, const hot::BackwardLinearSpec& spec,
                 const hot::ForwardLinearSpec& forward, bool int8, const hot::Context& context,
                 int device, std::uintptr_t handle);
// Whether an operator of the calling thread lacked one of these. Then it does not ask again.
bool torch_unknown();
// Forgets all contexts. A forked child must not wait for a lock of its parent's threads.
void torch_forget(bool forked);
// Sets the message of the calling thread's next failing operator.
void torch_error(const std::string& message);

}  // namespace hotpy
