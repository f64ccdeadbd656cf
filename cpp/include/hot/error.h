// The one exception type of the library.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "hot/api.h"

namespace hot {

enum class ErrorCode : std::uint8_t {
  invalid_argument,     // the message names the argument, its value and the expected value
  unsupported,          // valid, but not on this device, in this build, or with these options
  workspace_too_small,  // the message states the required bytes
  cuda,                 // a CUDA call failed; the message contains CUDA's text
};

class HOT_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace hot
