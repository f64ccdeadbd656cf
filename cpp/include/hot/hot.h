// All public headers of libhot.
#pragma once

#include "hot/api.h"
#include "hot/backward_linear.h"
#include "hot/blocks.h"
#include "hot/context.h"
#include "hot/device.h"
#include "hot/error.h"
#include "hot/explain.h"
#include "hot/forward_linear.h"
#include "hot/gemm.h"
#include "hot/hadamard.h"
#include "hot/lowrank.h"
#include "hot/memory.h"
#include "hot/pack.h"
#include "hot/quantize.h"
#include "hot/tensor.h"
#include "hot/weight_int4.h"
