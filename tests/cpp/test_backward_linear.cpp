#include <atomic>
#include <thread>

#include "support.h"

using namespace hot_test;
using hot::BackwardLinearSpec;
using hot::Basis;
using hot::Granularity;

namespace {

std::int64_t any_size() {
  const std::int64_t sizes[] = {1, 2, 15, 16, 17, 31, 49, 64, 97, 197};
  return sizes[random_int(0, 9)];
}

}  // namespace

TEST(BackwardLinear, same_bits_on_every_path) {
  for (auto& [name, spec] : recipes()) {
    const std::vector<std::array<std::int64_t, 3>> sizes = {
        {any_size(), any_size(), any_size()}, {600, 130, 70}, {3, 5, 4200}};
    for (const Granularity gw_scale :
         {Granularity::channel, Granularity::tensor, Granularity::token}) {
      spec.gw_scale = gw_scale;
      for (const auto& size : sizes) {
        Layer layer(size[0], size[1], size[2], spec);
        layer.run(cpu(1).with_isa(hot::Isa::plain));
        const std::vector<char> expected = layer.bytes();
        for (const hot::Isa isa : isas()) {
          for (const int threads : {1, 3, 8}) {
            std::fill(layer.saved.begin(), layer.saved.end(), static_cast<char>(0x5A));
            layer.run(cpu(threads).with_isa(isa));
            ASSERT_EQ(layer.bytes(), expected)
                << name << " " << hot::isa_name(isa) << " " << threads;
          }
        }
        EXPECT_TRUE(layer.gx.margins_intact() && layer.gw.margins_intact());
      }
    }
  }
}

// All configurations that store x itself.
std::vector<BackwardLinearSpec> full_specs() {
  std::vector<BackwardLinearSpec> all;
  for (const std::string& name : recipe_names()) {
    BackwardLinearSpec spec = recipe(name);
    spec.low_rank = {};
    all.push_back(spec);
    spec.equalize_tokens = true;
    all.push_back(spec);
  }
  return all;
}

TEST(BackwardLinear, decompresses_into_any_strides) {
  for (const BackwardLinearSpec& spec : full_specs()) {
    Layer layer(150, 1, 67, spec);
    layer.compress(cpu());
    Floats rows(99, 67, DType::f32), columns(67, 99, DType::f32, 2);
    hot::decompress_activation(cpu(), layer.saved_view(), 31, 130, spec, rows.view());
    hot::decompress_activation(cpu(), layer.saved_view(), 31, 130, spec, turned(columns.view()));
    EXPECT_TRUE(columns.margins_intact());
    for (std::int64_t l = 0; l < 99; ++l) {
      for (std::int64_t i = 0; i < 67; ++i) ASSERT_EQ(columns.at(i, l), rows.at(l, i));
    }
  }
}

TEST(BackwardLinear, strided_and_many_dimensional) {
  Layer layer(24, 18, 20, recipe("default"));
  layer.run(cpu());
  // Expects equal gradients from [2, 3, 4, O] with a gap between rows, and a column-major w.
  Floats gy = floats(24, 18, layer.gy.values(), 6);
  ConstTensorView deep{gy.data(), DType::f32, {}, 4, {2, 3, 4, 18}, {12 * 24, 4 * 24, 24, 1}};
  Floats columns(20, 18, DType::f32);
  for (std::int64_t o = 0; o < 18; ++o) {
    for (std::int64_t i = 0; i < 20; ++i) columns.at(i, o) = layer.w.at(o, i);
  }
  const TensorView w = turned(columns.view());
  Floats gx(24, 20, DType::f32), gw(18, 20, DType::f32);
  TensorView vx{gx.data(), DType::f32, {}, 4, {2, 3, 4, 20}, {240, 80, 20, 1}};
  const TensorView vw = gw.view();
  Scratch scratch(hot::backward_linear_workspace(cpu(), {24, 18, 20}, layer.spec, true, true));
  hot::backward_linear(cpu(), deep, w, layer.saved_view(), layer.spec, {&vx, &vw, nullptr, false},
                       scratch.workspace());
  EXPECT_EQ(gx.values(), layer.gx.values());
  EXPECT_EQ(gw.values(), layer.gw.values());
}

// Threads of the program that make the requested calls, or fewer.
TEST(BackwardLinear, an_executor_gives_the_same_bits) {
  struct Crew {
    int most;  // calls
    std::atomic<int> jobs{0};
    static void run(void* state, int threads, hot::Executor::Work work, void* data) {
      auto& crew = *static_cast<Crew*>(state);
      ++crew.jobs;
      std::vector<std::thread> others;
      for (int i = 1; i < std::min(threads, crew.most); ++i) others.emplace_back(work, data);
      if (crew.most > 0) work(data);
      for (std::thread& other : others) other.join();
    }
  };
  for (const std::string& name : recipe_names()) {
    Layer layer(any_size() + 16, any_size(), any_size(), recipe(name));
    layer.run(cpu(3));
    const std::vector<char> expected = layer.bytes();
    for (const int calls : {0, 1, 3, 9}) {
      Crew crew{calls};
      const hot::Context context =
          hot::Context::cpu(hot::Executor{Crew::run, &crew}, 5).with_key(cpu().key());
      EXPECT_EQ(context.threads(), 5);
      layer.run(context);
      EXPECT_GT(crew.jobs, 0);
      EXPECT_EQ(layer.bytes(), expected) << name;
    }
  }
  EXPECT_THROW(hot::Context::cpu(hot::Executor{}), hot::Error);
}

TEST(BackwardLinear, callers_come_and_go) {
  const hot::Context shared = cpu(3);
  const char* const recipes[] = {"default", "fast", "paper", "accurate"};
  std::vector<Layer> layers;
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < 8; ++i) {
    layers.emplace_back(any_size() + 16, any_size(), any_size(), recipe(recipes[i % 4]));
    layers.back().run(shared);
    alone.push_back(layers.back().gw.values());
  }
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 10; ++round) {
        // Every second caller creates and destroys a thread pool per call.
        layers[i].run(i % 2 == 0 ? shared : cpu(3));
        EXPECT_EQ(layers[i].gw.values(), alone[i]) << recipes[i % 4];
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}
