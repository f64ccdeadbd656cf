// Backward of a linear layer through an installed libhot, compared with plain products. The option
// --cuda also runs on a GPU and compares bit for bit.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <hot/hot.h>

#ifdef CONSUMER_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

using Floats = std::vector<float>;

constexpr std::int64_t L = 50, O = 24, I = 40;

Floats waves(std::int64_t count, double step) {
  Floats values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(std::sin(step * static_cast<double>(i * i % 1009))));
  }
  return values;
}

// Relative error |got - expected| / |expected| in the Euclidean norm. `expected(row, col)` is fp64.
template <class Expected>
double distance(const Floats& got, std::int64_t rows, std::int64_t cols, const Expected& expected) {
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

bool expect(bool fine, const char* what) {
  if (!fine) std::printf("FAILED: %s\n", what);
  return fine;
}

bool expect_below(const char* what, double value, double limit) {
  std::printf("%-4s relative error %.5f (limit %.5f)\n", what, value, limit);
  return value < limit;
}

// Memory of a run's arrays.
struct Place {
  hot::Context context;
  hot::Allocator allocator;
  void (*copy)(void* to, const void* from, std::size_t bytes);  // in both directions

  hot::Tensor tensor(std::initializer_list<std::int64_t> shape) const {
    return hot::Tensor(hot::DType::f32, shape, allocator);
  }
  hot::Tensor tensor(std::initializer_list<std::int64_t> shape, const Floats& values) const {
    hot::Tensor copied = tensor(shape);
    copy(copied.data<void>(), values.data(), copied.bytes());
    return copied;
  }
  Floats values(const hot::Tensor& tensor) const {
    Floats out(static_cast<std::size_t>(tensor.size()));
    copy(out.data(), tensor.data<void>(), tensor.bytes());
    return out;
  }
};

struct Gradients {
  Floats gx, gw, gb;
};

Gradients backward(const Place& place, const hot::BackwardLinearSpec& spec, const Floats& gy_values,
                   const Floats& w_values, const Floats& x_values) {
  const hot::Context& context = place.context;
  const hot::Tensor gy = place.tensor({L, O}, gy_values), w = place.tensor({O, I}, w_values),
                    x = place.tensor({L, I}, x_values);
  hot::ScratchBuffer scratch(place.allocator);
  hot::SavedBuffer saved(place.allocator);
  saved.compress(context, x.view(), spec, scratch);  // forward: keep x compressed

  hot::Tensor gx = place.tensor({L, I}), gw = place.tensor({O, I}), gb = place.tensor({O});
  hot::backward_linear(
      context, gy.view(), w.view(), saved, spec, {&gx.view(), &gw.view(), &gb.view(), false},
      scratch.at_least(hot::backward_linear_workspace(context, {L, O, I}, spec, true, true)));
  return {place.values(gx), place.values(gw), place.values(gb)};
}

bool run(const Place& place, const Floats& gy, const Floats& w, const Floats& x) {
  const Gradients got = backward(place, hot::recipe("accurate"), gy, w, x);
  const auto at = [](const Floats& v, std::int64_t i) {
    return static_cast<double>(v[static_cast<std::size_t>(i)]);
  };
  const auto gx = [&](std::int64_t l, std::int64_t i) {
    double sum = 0;
    for (std::int64_t o = 0; o < O; ++o) sum += at(gy, l * O + o) * at(w, o * I + i);
    return sum;
  };
  const auto gw = [&](std::int64_t o, std::int64_t i) {
    double sum = 0;
    for (std::int64_t l = 0; l < L; ++l) sum += at(gy, l * O + o) * at(x, l * I + i);
    return sum;
  };
  const auto gb = [&](std::int64_t, std::int64_t o) {
    double sum = 0;
    for (std::int64_t l = 0; l < L; ++l) sum += at(gy, l * O + o);
    return sum;
  };
  bool ok = expect_below("g_x", distance(got.gx, L, I, gx), 0.03);
  ok &= expect_below("g_w", distance(got.gw, O, I, gw), 0.03);
  return expect_below("g_b", distance(got.gb, 1, O, gb), 1e-5) && ok;
}

template <class Call>
bool refuses(const char* what, const char* words, const Call& call) {
  try {  // exceptions keep their type across the library's boundary
    call();
  } catch (const hot::Error& error) {
    std::printf("expected error: %s\n", error.what());
    return expect(error.code() == hot::ErrorCode::invalid_argument &&
                      std::strstr(error.what(), words) != nullptr,
                  what);
  }
  return expect(false, what);
}

bool errors(const Place& place) {
  hot::Tensor x = place.tensor({16});
  hot::ScratchBuffer scratch(place.allocator);
  bool ok = refuses("a block of 7", "block is 7",
                    [&] { hot::fwht(place.context, x.view(), 0, 7, x.view()); });
  ok &= refuses("an unknown recipe", "expected one of 'default'", [] { hot::recipe("best"); });
  ok &= refuses("an empty SavedBuffer", "saved.format is 0", [&] {
    hot::Tensor gw = place.tensor({4, 4}), gy = place.tensor({4, 4});
    hot::backward_linear(place.context, gy.view(), hot::ConstTensorView{}, hot::SavedBuffer(), {},
                         {nullptr, &gw.view(), nullptr}, {});
  });
  ok &= refuses("a negative size", "shape[1] is -2", [] { hot::Tensor(hot::DType::f32, {3, -2}); });
  ok &= refuses("five dimensions", "5 dimensions",
                [] { hot::Tensor(hot::DType::i8, {1, 1, 1, 1, 1}); });
  const std::int64_t huge = std::int64_t{1} << 40;
  for (const std::int64_t none : {0, 1}) {
    ok &= refuses("more elements than addresses", "shape[2] is 1099511627776",
                  [&] { hot::Tensor(hot::DType::f32, {none, huge, huge}); });
  }
  ok &= refuses("an x of five dimensions", "x has 5 dimensions", [&] {
    hot::ConstTensorView five = x.view();
    five.ndim = 5;
    hot::SavedBuffer(place.allocator).compress(place.context, five, {}, scratch);
  });
  return ok;
}

// Owning memory: the last owner frees it once; null is an error.
bool ownership() {
  int held = 0, taken = 0;
  const hot::Allocator host = hot::host_allocator();
  const hot::Allocator counting{hot::Device{},
                                [&](std::size_t bytes) {
                                  ++held, ++taken;
                                  return host.allocate(bytes);
                                },
                                [&](void* data) {
                                  --held;
                                  host.release(data);
                                }};
  bool ok = true;
  {
    hot::Tensor a(hot::DType::bf16, {2, 3}, counting), b(hot::DType::f32, {0, 5}, counting);
    ok &= expect(a.bytes() == 12 && a.size() == 6 && a.view().stride[0] == 3 && held == 1, "sizes");
    ok &= expect(b.bytes() == 0 && b.data<float>() == nullptr, "nothing takes nothing");
    const void* const data = a.data<void>();
    hot::Tensor c = std::move(a);
    b = std::move(c);
    ok &= expect(b.view().data == data && a.view().data == nullptr && held == 1, "moves");
    hot::ScratchBuffer scratch(counting);
    scratch.at_least(100);
    scratch.at_least(50);
    ok &= expect(scratch.at_least(1000).bytes == 1000 && taken == 3 && held == 2, "scratch grows");
    hot::SavedBuffer saved(counting);
    const hot::Tensor x(hot::DType::f32, {64, 8});
    for (int step = 0; step < 3; ++step)
      saved.compress(hot::Context::cpu(1), x.view(), {}, scratch);
    const hot::ConstSavedActivation& kept = saved;
    ok &= expect(taken == 4 && kept.tokens == 64 && kept.format == hot::saved_format({}), "saved");
    hot::SavedBuffer moved = std::move(saved);
    const hot::ConstSavedActivation &there = moved, &left = saved;
    ok &= expect(there.tokens == 64 && left.data == nullptr && left.bytes == 0, "saved moves");
    moved = hot::SavedBuffer(counting);
    ok &= expect(there.data == nullptr && held == 2, "saved is replaced");
  }
  ok &= expect(held == 0, "all is given back");
  try {
    hot::Buffer(8, {hot::Device{}, [](std::size_t) { return nullptr; }, [](void*) {}});
    ok &= expect(false, "null is an error");
  } catch (const std::bad_alloc&) {
  }
  return ok;
}

#ifdef CONSUMER_CUDA
void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

bool same_on_cuda(const Place& cpu, const Floats& gy, const Floats& w, const Floats& x) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  const Place gpu{hot::Context::cuda(0, stream).with_key(cpu.context.key()),
                  {hot::Device{hot::Device::Type::cuda, 0},
                   [](std::size_t bytes) {
                     void* data = nullptr;
                     check(cudaMalloc(&data, bytes));
                     return data;
                   },
                   [](void* data) { static_cast<void>(cudaFree(data)); }},
                  [](void* to, const void* from, std::size_t bytes) {
                    check(cudaDeviceSynchronize());
                    check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
                  }};
  bool ok = true;
  for (const std::string& name : hot::recipe_names()) {
    if (!hot::supported(gpu.context, {L, O, I}, hot::recipe(name)).ok) continue;
    const Gradients a = backward(cpu, hot::recipe(name), gy, w, x);
    const Gradients b = backward(gpu, hot::recipe(name), gy, w, x);
    ok &= expect(a.gx == b.gx && a.gw == b.gw, ("the GPU's bits, " + name).c_str());
  }
  check(cudaStreamDestroy(stream));
  std::printf("GPU: g_x and g_w as on the CPU\n");
  return ok;
}
#endif

}  // namespace

int main(int count, char** arguments) {
  std::printf("libhot %s\n", hot::version());
  try {
    const Floats gy = waves(L * O, 0.37), w = waves(O * I, 0.71), x = waves(L * I, 0.53);
    const Place cpu{
        hot::Context::cpu(2).with_key({1, 2, 3}), hot::host_allocator(),
        [](void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }};
    bool ok = run(cpu, gy, w, x);
    ok &= errors(cpu);
    ok &= ownership();
    if (count > 1 && std::strcmp(arguments[1], "--cuda") == 0) {
#ifdef CONSUMER_CUDA
      ok &= same_on_cuda(cpu, gy, w, x);
#else
      throw std::runtime_error("--cuda: built without CONSUMER_CUDA");
#endif
    }
    return ok ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
