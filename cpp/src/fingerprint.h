// Hash of the fields that define the format of a saved buffer.
#pragma once

#include <cstdint>

namespace hot::detail {

// FNV-1a hash of numbers; never 0.
class Fingerprint {
 public:
  template <class Number>
  Fingerprint& add(Number number) {
    auto bits = static_cast<std::uint64_t>(number);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) {
      value_ = (value_ ^ (bits & 0xFF)) * 0x100000001B3ULL;
    }
    return *this;
  }
  std::uint64_t value() const { return value_ == 0 ? 1 : value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325ULL;
};

}  // namespace hot::detail
