// Shape of a kernel launch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hot::detail {

struct LaunchShape {
  std::int64_t blocks = 0;
  int threads = 0;
  std::size_t shared_bytes = 0;
  int cluster = 1;  // CTAs per cluster; above 1 only from sm_90 on
  int rows = 1;     // blockDim.y
};

}  // namespace hot::detail
