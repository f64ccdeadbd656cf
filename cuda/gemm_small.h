// Up to two independent INT8 products in one launch, for layers so small that launches and latency
// take the time, not arithmetic.
#pragma once

#include "kernels.h"

namespace hot::detail {

// How a launch divides its work.
struct SmallPlan {
  int tile_m;    // rows of a tile, 64 or 128 (it has 64 columns)
  int cluster;   // thread blocks of a cluster: 1, 2, 4 or 8; 1 before sm_90
  int share[2];  // of them that divide the contraction of one tile; a power of two, <= cluster
};

// Whether small_gemms computes these products (count: 1 or 2); says nothing about profit.
bool small_gemms_can(const Context&, const GemmArgs* products, int count);

// The plan that small_gemms follows, for products that it can do.
SmallPlan small_plan(const Context&, const GemmArgs* products, int count);

// All products, with the bits of gemm_sm80.h. Neither may write what the other touches.
void small_gemms(const Context&, const GemmArgs* products, int count);
// The same by another plan, with the same results.
void small_gemms(const Context&, const GemmArgs* products, int count, const SmallPlan&);

}  // namespace hot::detail
