// Stage: HLA along the tokens, and the quantisation of its rows. The unit of work is a strip of
// `strip_columns` columns. A small buffer receives a strip's rows of P x block by block. It passes
// them on in groups of 16, the unit of the random bits and of the transposed stores. Quantisation
// needs the largest values before it rounds. If a strip's rows fit a core's L2 cache, it keeps them
// in between. Otherwise it makes two passes over x: computing the rows twice costs less memory
// traffic than storing them.
#include <algorithm>
#include <cstring>

#include "cpu/backend.h"
#include "cpu/scalar.h"
#include "work.h"

namespace hot::detail {
namespace {

constexpr int max_strip_block = 256;  // the largest hadamard_block
constexpr int group = 16;

// Computes the rows of P x for one strip of columns.
class Strip {
 public:
  Strip(const SimdKernels& simd, const MatrixIn& x, const Projection& p, const RandomKey& random,
        std::int64_t col)
      : simd_(simd),
        p_(p),
        random_(random),
        x_(simd, x, col, std::min<std::int64_t>(strip_columns, x.cols - col)) {
    // Lanes beyond the last column stay 0 in every transform.
    if (x_.count() < strip_columns) {
      std::memset(raw_, 0, sizeof raw_);
      std::memset(rows_, 0, sizeof rows_);
    }
  }

  int cols() const { return static_cast<int>(x_.count()); }

  // Calls visit(k, rows) for every `group` rows of P x, starting at row k, in blocks [begin, end).
  // The last range also covers the prefix rows and the padding.
  template <class Visit>
  void groups(std::int64_t begin, std::int64_t end, const Visit& visit) {
    std::int64_t k = begin * p_.rank;
    int filled = 0;
    const auto emit = [&] {
      int done = 0;
      for (; done + group <= filled; done += group, k += group) {
        visit(k, rows_ + done * strip_columns);
      }
      if (done == 0) return;
      filled -= done;
      std::memmove(rows_, rows_ + done * strip_columns,
                   static_cast<std::size_t>(filled) * strip_columns * sizeof(float));
    };
    for (std::int64_t block = begin; block < end; ++block) {
      project(block, rows_ + filled * strip_columns);
      filled += p_.rank;
      if (filled >= group) emit();
    }
    if (end < p_.blocks) return;
    for (std::int64_t j = 0; j < p_.order.prefix_rows(); ++j) {
      float* row = rows_ + filled * strip_columns;
      x_.load(p_.order.prefix_token(j), row);
      simd_.scale_row(row, p_.prefix_factor);
      if (++filled >= group) emit();
    }
    if (filled > 0) {
      std::memset(rows_ + filled * strip_columns, 0,
                  static_cast<std::size_t>(group - filled) * strip_columns * sizeof(float));
      visit(k, rows_);
    }
  }

 private:
  void load_block(std::int64_t block, float* to) {
    for (int t = 0; t < p_.block; ++t) {
      const std::int64_t position = block * p_.block + t;
      float* row = to + t * strip_columns;
      if (position < p_.body_tokens) {
        x_.load(p_.order.body(position), row);
        const std::int64_t soon = position + group;
        if (soon < p_.body_tokens) x_.prefetch(p_.order.body(soon));
      } else {
        std::memset(row, 0, strip_columns * sizeof(float));
      }
    }
  }

  void project(std::int64_t block, float* to) {
    if (p_.basis == Basis::sketch) return project_sketch(block, to);
    const bool all_rows = p_.rank == p_.block;
    float* const rows = all_rows ? to : raw_;
    load_block(block, rows);
    if (p_.basis != Basis::full) simd_.fwht_strip(rows, p_.block);
    if (all_rows) return;
    for (int i = 0; i < p_.rank; ++i) {
      std::memcpy(to + i * strip_columns,
                  raw_ + p_.rows[static_cast<std::size_t>(i)] * strip_columns,
                  strip_columns * sizeof(float));
    }
  }

  void project_sketch(std::int64_t block, float* to) {
    if (p_.folds == 0) {
      load_block(block, to);
    } else {
      load_block(block, raw_);
      const Philox draw = philox_block(random_, static_cast<std::uint64_t>(block));
      int length = p_.block;
      for (int j = 0; j < p_.folds; ++j, length /= 2) {
        const auto nonzero = static_cast<std::uint64_t>(length - 1);
        const int a = 1 + static_cast<int>((draw.word[j] * nonzero) >> 32);
        const bool last = j + 1 == p_.folds;
        // Folding in place is safe: result i reads only rows >= i.
        float* half = last ? to : folded_;
        simd_.fold_strip(j == 0 ? raw_ : folded_, length, a, half);
      }
    }
    simd_.fwht_strip(to, p_.rank);
    if (p_.sketch_weight == 1.0F) return;
    for (int i = 1; i < p_.rank; ++i) {
      simd_.scale_row(to + i * strip_columns, p_.sketch_weight);
    }
  }

  const SimdKernels& simd_;
  const Projection& p_;
  RandomKey random_;  // key of the sketch
  ColumnStrip x_;
  alignas(64) float raw_[max_strip_block * strip_columns];
  alignas(64) float folded_[32 * strip_columns];  // half the largest low-rank block
  alignas(64) float rows_[(group + max_strip_block) * strip_columns];
};

}  // namespace

StripTasks::StripTasks(const Context& context, const MatrixIn& x, const Projection& p,
                       bool may_be_whole)
    : strips_(ceil_div(x.cols, strip_columns)), blocks_(p.blocks) {
  if (strips_ == 0) return;
  if (may_be_whole && keeps_strips(context, strips_, p.k_padded)) {
    range_blocks_ = std::max<std::int64_t>(1, blocks_);
    ranges_ = 1;
    whole_ = true;
    return;
  }
  const std::int64_t cut = blocks_per_cut(p.rank);
  const std::int64_t wanted = ceil_div(std::int64_t{8} * context.threads(), strips_);
  const std::int64_t smallest =
      ceil_div(task_elements(context, x.rows * x.cols), std::int64_t{p.block} * strip_columns);
  range_blocks_ = round_up(std::max(smallest, ceil_div(p.blocks, wanted)), cut);
  ranges_ = std::max<std::int64_t>(1, ceil_div(p.blocks, range_blocks_));
}

StripTasks::Task StripTasks::operator[](std::int64_t task) const {
  const std::int64_t begin = task / strips_ * range_blocks_;
  return {task % strips_ * strip_columns, begin, std::min(blocks_, begin + range_blocks_)};
}

void CpuBackend::hla(const Context& context, const MatrixIn& x, const Projection& p,
                     const Key& sketch_key, const MatrixOut& out) const {
  if (p.k == 0 || x.cols == 0) return;
  const SimdKernels& simd = simd_kernels(context.isa());
  const StripTasks tasks(context, x, p);
  const RandomKey sketch = random_key(sketch_key, Purpose::sketch);
  context.pool()->run(tasks.count(), [&](std::int64_t task) {
    const StripTasks::Task part = tasks[task];
    Strip strip(simd, x, p, sketch, part.col);
    strip.groups(part.begin, part.end, [&](std::int64_t k, const float* rows) {
      for (std::int64_t i = 0; i < std::min<std::int64_t>(group, p.k - k); ++i) {
        store_row(simd, rows + i * strip_columns, k + i, part.col, strip.cols(), out);
      }
    });
  });
}

QuantizeColumns::QuantizeColumns(const Context& context, const Operand& job)
    : simd_(simd_kernels(context.isa())),
      job_(job),
      random_(random_key(job.sketch_key, Purpose::sketch)),
      rounder_{job.quant.rounding, job.quant.bits, random_key(context.key(), job.quant.purpose)},
      tasks_(context, job.x, job.transform, !job.quant.per_tensor && !job.quant.per_contraction),
      scales_(job.quant.per_tensor ? 1 : job.out.scales) {
  std::fill_n(amax(), scales_, 0U);
}

void QuantizeColumns::add_largest(Phase& phase) const {
  if (tasks_.whole()) return phase.add<&QuantizeColumns::whole>(tasks_.count(), *this);
  phase.add<&QuantizeColumns::largest>(tasks_.count(), *this);
}

void QuantizeColumns::add_codes(Phase& phase, bool amax_known) const {
  if (amax_known || !tasks_.whole()) phase.add<&QuantizeColumns::codes>(tasks_.count(), *this);
}

void QuantizeColumns::largest(std::int64_t task) const {
  const OperandQuant& quant = job_.quant;
  const auto [col, begin, end] = tasks_[task];
  Strip strip(simd_, job_.x, job_.transform, random_, col);
  std::uint32_t best[strip_columns] = {};
  std::uint32_t tensor_amax = 0;
  strip.groups(begin, end, [&](std::int64_t k, const float* rows) {
    if (quant.per_contraction) {
      for (int i = 0; i < group; ++i) {
        atomic_max(amax() + k + i, simd_.amax(rows + i * strip_columns, strip_columns, 0));
      }
    } else if (quant.per_tensor) {
      tensor_amax = simd_.amax(rows, group * strip_columns, tensor_amax);
    } else {
      simd_.amax_strip(rows, group, best);
    }
  });
  if (quant.per_tensor) {
    atomic_max(amax(), tensor_amax);
  } else if (!quant.per_contraction) {
    for (int c = 0; c < strip.cols(); ++c) atomic_max(amax() + col + c, best[c]);
  }
}

// Writes a strip's codes, one group of rows at a time, once the largest values are known.
class QuantizeColumns::Writer {
 public:
  Writer(const QuantizeColumns& columns, std::int64_t col, int cols)
      : of_(columns), col_(col), cols_(cols) {
    const OperandQuant& quant = columns.job_.quant;
    for (int c = 0; !quant.per_contraction && c < cols; ++c) {
      set(c, columns.amax()[quant.per_tensor ? 0 : col + c]);
    }
  }

  void group_of(std::int64_t k, const float* rows) {
    const Codes& out = of_.job_.out;
    for (int c = 0; c < cols_; ++c) {
      blk_[c] = static_cast<std::uint64_t>((col_ + c) * (out.k_padded / group) + k / group);
    }
    std::int8_t* const to = out.codes + col_ * out.k_padded + k;
    if (of_.job_.quant.per_contraction) {
      for (int i = 0; i < group; ++i) set(i, of_.amax()[k + i]);
      of_.simd_.quantize_strip_by_k(rows, cols_, inv_, keep_, of_.rounder_, blk_, to, out.k_padded);
    } else {
      of_.simd_.quantize_strip(rows, cols_, inv_, keep_, of_.rounder_, blk_, to, out.k_padded);
    }
  }

 private:
  void set(int i, std::uint32_t bits) {
    const Scale scale = make_scale(bits, of_.job_.quant.bits);
    inv_[i] = scale.inv;
    keep_[i] = scale.keep;
  }

  const QuantizeColumns& of_;
  std::int64_t col_;
  int cols_;
  float inv_[strip_columns] = {};
  std::uint32_t keep_[strip_columns] = {};
  std::uint64_t blk_[strip_columns] = {};
};

void QuantizeColumns::codes(std::int64_t task) const {
  const auto [col, begin, end] = tasks_[task];
  Strip strip(simd_, job_.x, job_.transform, random_, col);
  Writer writer(*this, col, strip.cols());
  strip.groups(begin, end, [&](std::int64_t k, const float* rows) { writer.group_of(k, rows); });
}

// Quantises a strip in one pass over x. Keeps the rows of P x between largest values and rounding.
void QuantizeColumns::whole(std::int64_t task) const {
  const auto [col, begin, end] = tasks_[task];
  Strip strip(simd_, job_.x, job_.transform, random_, col);
  alignas(64) float all_rows[most_kept_rows * strip_columns];
  std::uint32_t best[strip_columns] = {};
  strip.groups(begin, end, [&](std::int64_t k, const float* rows) {
    simd_.amax_strip(rows, group, best);
    std::memcpy(all_rows + k * strip_columns, rows, group * strip_columns * sizeof(float));
  });
  std::copy_n(best, strip.cols(), amax() + col);
  Writer writer(*this, col, strip.cols());
  for (std::int64_t k = 0; k < job_.out.k_padded; k += group) {
    writer.group_of(k, all_rows + k * strip_columns);
  }
}

void QuantizeColumns::finish(std::int64_t) const {
  const Codes& out = job_.out;
  patterns_to_scales(out.scale, scales_, job_.quant.bits);
  // Repeats a single scale as CUDA does, so that both backends read the same quantised weight.
  if (job_.quant.per_tensor) std::fill(out.scale + 1, out.scale + out.scales, out.scale[0]);
}

// Sums of a strip's columns. Blocks of 16 tokens are added in the order of row 0 of their FWHT, 64
// blocks in fp32, the sums of these in fp64.
void SumColumns::sum(std::int64_t strip) const {
  constexpr int run_blocks = 64;
  const std::int64_t col = strip * strip_columns;
  const std::int64_t cols = std::min<std::int64_t>(strip_columns, x_.cols - col);
  const ColumnStrip from(simd_, x_, col, cols);
  alignas(64) float rows[group * strip_columns] = {};
  double total[strip_columns] = {};
  for (std::int64_t start = 0; start < x_.rows; start += run_blocks * group) {
    float run[strip_columns] = {};
    const std::int64_t stop = std::min<std::int64_t>(x_.rows, start + run_blocks * group);
    for (std::int64_t token = start; token < stop; token += group) {
      for (std::int64_t t = 0; t < group; ++t) {
        float* row = rows + t * strip_columns;
        if (token + t < stop) {
          from.load(token + t, row);
          if (token + t + group < stop) from.prefetch(token + t + group);
        } else {
          std::memset(row, 0, strip_columns * sizeof(float));
        }
      }
      for (int length = group; length > 1; length /= 2) simd_.fold_strip(rows, length, 1, rows);
      for (int c = 0; c < strip_columns; ++c) run[c] += rows[c];
    }
    for (int c = 0; c < strip_columns; ++c) total[c] += static_cast<double>(run[c]);
  }
  float sums[strip_columns], before[strip_columns];
  for (int c = 0; c < strip_columns; ++c) sums[c] = static_cast<float>(total[c]);
  if (accumulate_) {
    load_row(simd_, out_.contents(), 0, col, cols, before);
    for (std::int64_t c = 0; c < cols; ++c) sums[c] = before[c] + sums[c];
  }
  store_row(simd_, sums, 0, col, cols, out_);
}

}  // namespace hot::detail
