// The hot path of the stage in lowrank.cu: blocks of 16 tokens, one scale a channel or a tensor.
#pragma once

#include "kernels.h"

namespace hot::detail {

bool resident_can(const Projection&, const OperandQuant&);

// Whether it can, reads x (of so many columns) once and needs no Operand::amax.
bool resident_one_pass(const Context&, std::int64_t cols, const Projection&, const OperandQuant&);

// quantize_columns where resident_can. A `sum` (null: not wanted) is done too.
void resident_quantize_columns(const Context&, const MatrixIn& x, const Projection&, Side,
                               const Key& sketch_key, const OperandQuant&, const Operand& out,
                               const ColumnSum* sum);

// The codes alone, where there are two passes and the first is done: Operand::amax holds the
// largest values.
void resident_quantize_codes(const Context&, const ColumnsJob&);

}  // namespace hot::detail
