// Backward of one linear layer through an installed libhot, checked against the plain products.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <hot/hot.h>

namespace {

constexpr std::int64_t L = 50, O = 24, I = 40;

std::vector<float> waves(std::int64_t count, double step) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i * i % 1009))));
  }
  return values;
}

// |got - expected| / |expected| in the Euclidean norm; `expected(row, col)` in fp64.
template <class Expected>
double distance(const std::vector<float>& got, std::int64_t rows, std::int64_t cols,
                const Expected& expected) {
  double error = 0, norm = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const double e = expected(r, c);
      const double d = static_cast<double>(got[static_cast<std::size_t>(r * cols + c)]) - e;
      error += d * d;
      norm += e * e;
    }
  }
  return std::sqrt(error / norm);
}

bool expect_below(const char* what, double value, double limit) {
  std::printf("%-4s relative error %.5f (limit %.5f)\n", what, value, limit);
  return value < limit;
}

// Scratch for one call; 256-byte aligned, as workspaces are to be.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : memory_(bytes + 256), bytes_(bytes) {}
  hot::Workspace workspace() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return {memory_.data() + (256 - address % 256) % 256, bytes_};
  }

 private:
  std::vector<unsigned char> memory_;
  std::size_t bytes_;
};

bool run() {
  const std::vector<float> gy = waves(L * O, 0.37), x = waves(L * I, 0.53), w = waves(O * I, 0.71);
  std::vector<float> gx(L * I, NAN), gw(O * I, NAN), gb(O, NAN);

  hot::BackwardLinearSpec spec;
  spec.storage = hot::Storage::int8;
  const hot::Context context = hot::Context::cpu(2).with_key({1, 2, 3});

  // Forward: keep x compressed.
  const hot::SavedLayout layout = hot::saved_layout(L, I, spec);
  alignas(16) static unsigned char saved[1 << 16];
  if (layout.bytes > sizeof saved) return false;
  Scratch forward(hot::compress_activation_workspace(context, L, I, spec));
  hot::compress_activation(context, hot::matrix(x.data(), hot::DType::f32, L, I), spec,
                           {saved, layout.bytes}, forward.workspace());

  // Backward.
  Scratch backward(hot::backward_linear_workspace(context, {L, O, I}, spec, true, true));
  const hot::TensorView to_gx = hot::matrix(gx.data(), hot::DType::f32, L, I);
  const hot::TensorView to_gw = hot::matrix(gw.data(), hot::DType::f32, O, I);
  const hot::TensorView to_gb = hot::vector(gb.data(), hot::DType::f32, O);
  hot::backward_linear(context, hot::matrix(gy.data(), hot::DType::f32, L, O),
                       hot::matrix(w.data(), hot::DType::f32, O, I),
                       {saved, layout.bytes, L, I, context.key()}, spec,
                       {&to_gx, &to_gw, &to_gb, false}, backward.workspace());

  const auto at = [](const std::vector<float>& v, std::int64_t i) {
    return static_cast<double>(v[static_cast<std::size_t>(i)]);
  };
  bool ok = expect_below("g_x",
                         distance(gx, L, I,
                                  [&](std::int64_t l, std::int64_t i) {
                                    double sum = 0;
                                    for (std::int64_t o = 0; o < O; ++o)
                                      sum += at(gy, l * O + o) * at(w, o * I + i);
                                    return sum;
                                  }),
                         0.03);
  ok &= expect_below("g_w",
                     distance(gw, O, I,
                              [&](std::int64_t o, std::int64_t i) {
                                double sum = 0;
                                for (std::int64_t l = 0; l < L; ++l)
                                  sum += at(gy, l * O + o) * at(x, l * I + i);
                                return sum;
                              }),
                     0.03);
  ok &= expect_below("g_b",
                     distance(gb, 1, O,
                              [&](std::int64_t, std::int64_t o) {
                                double sum = 0;
                                for (std::int64_t l = 0; l < L; ++l) sum += at(gy, l * O + o);
                                return sum;
                              }),
                     1e-5);

  // Exceptions of the library arrive here as what they are.
  try {
    hot::fwht(context, hot::vector(gy.data(), hot::DType::f32, L * O), 0, 7,
              hot::vector(gx.data(), hot::DType::f32, L * O));
    ok = false;
  } catch (const hot::Error& error) {
    ok &= error.code() == hot::ErrorCode::invalid_argument;
    std::printf("expected error: %s\n", error.what());
  }
  return ok;
}

}  // namespace

int main() {
  std::printf("libhot %s\n", hot::version());
  try {
    return run() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
