// Emulation of AMX's tile registers in plain C++, for machines without AMX. Included before
// simd_amx.cpp, it replaces the intrinsics. Operations that the processor would refuse fail the
// test.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd

namespace amx_tiles {

inline constexpr int count = 8, most_rows = 16, most_bytes = 64;

struct State {
  bool configured = false;
  int configurations = 0;
  std::uint16_t row_bytes[count] = {};
  std::uint8_t rows[count] = {};
  std::int8_t tile[count][most_rows][most_bytes] = {};
};

inline thread_local State state;

void expect(bool held, const char* rule);  // defined by the test

inline bool usable(int tile) { return state.configured && state.rows[tile] > 0; }

inline void load_config(const void* from) {
  const auto* const bytes = static_cast<const std::uint8_t*>(from);
  expect(bytes[0] == 1 && bytes[1] == 0, "palette 1, no row to go on from");
  for (int i = 2; i < 16; ++i) expect(bytes[i] == 0, "reserved bytes are 0");
  for (int i = count; i < 16; ++i) {
    expect(bytes[16 + 2 * i] == 0 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 0, "eight tiles");
  }
  std::memcpy(state.row_bytes, bytes + 16, sizeof state.row_bytes);
  std::memcpy(state.rows, bytes + 48, sizeof state.rows);
  for (int i = 0; i < count; ++i) {
    expect(state.rows[i] <= most_rows && state.row_bytes[i] <= most_bytes, "a tile's size");
    expect((state.rows[i] == 0) == (state.row_bytes[i] == 0), "rows with bytes");
  }
  std::memset(state.tile, 0, sizeof state.tile);
  state.configured = true;
  ++state.configurations;
}

inline void release() { state.configured = false; }

inline void zero(int tile) {
  expect(usable(tile), "zero: a configured tile");
  std::memset(state.tile[tile], 0, sizeof state.tile[tile]);
}

inline void load(int tile, const void* from, std::int64_t stride) {
  expect(usable(tile), "load: a configured tile");
  std::memset(state.tile[tile], 0, sizeof state.tile[tile]);
  for (int row = 0; row < state.rows[tile]; ++row) {
    std::memcpy(state.tile[tile][row], static_cast<const char*>(from) + row * stride,
                state.row_bytes[tile]);
  }
}

inline void store(int tile, void* to, std::int64_t stride) {
  expect(usable(tile), "store: a configured tile");
  for (int row = 0; row < state.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, state.tile[tile][row],
                state.row_bytes[tile]);
  }
}

// sums += a times b. Rows of b hold four k of each column.
inline void multiply(int sums, int a, int b) {
  expect(usable(sums) && usable(a) && usable(b), "multiply: configured tiles");
  expect(sums != a && sums != b && a != b, "multiply: three tiles");
  expect(state.rows[sums] == state.rows[a] && state.row_bytes[sums] == state.row_bytes[b] &&
             state.row_bytes[a] == 4 * state.rows[b],
         "multiply: sizes that fit");
  const int columns = state.row_bytes[sums] / 4;
  for (int m = 0; m < state.rows[sums]; ++m) {
    std::uint32_t row[most_bytes / 4];  // modulo 2^32, like AMX
    std::memcpy(row, state.tile[sums][m], sizeof row);
    for (int k = 0; k < state.rows[b]; ++k) {
      for (int n = 0; n < columns; ++n) {
        std::int32_t four = 0;
        for (int j = 0; j < 4; ++j) {
          four += state.tile[a][m][4 * k + j] * state.tile[b][k][4 * n + j];
        }
        row[n] += static_cast<std::uint32_t>(four);
      }
    }
    std::memcpy(state.tile[sums][m], row, sizeof row);
  }
}

}  // namespace amx_tiles

#define _tile_loadconfig(from) amx_tiles::load_config(from)
#define _tile_release() amx_tiles::release()
#define _tile_zero(tile) amx_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) amx_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) amx_tiles::store(tile, to, stride)
#define _tile_dpbssd(sums, a, b) amx_tiles::multiply(sums, a, b)
