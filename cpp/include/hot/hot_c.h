/* libhot for C and for every language that can call C: the same core as hot/hot.h. Those headers
 * state what each stage computes, with shapes, dtypes and errors; docs/numerics.md defines the
 * bits.
 *
 * - Every function that can fail returns a hot_status: HOT_OK or the kind of error. After an error
 *   hot_last_error() has the text, and no output was written. No C++ exception leaves the library.
 * - Contexts are opaque handles. All other arguments are plain structs of the caller, with
 *   struct_size = sizeof the struct as the first member (the HOT_*_INIT macros set it). A later
 *   version adds members at the end and still takes the shorter structs of earlier ones. A longer
 *   struct, from a later header, is refused unless the members that this library lacks are zero.
 * - Enumerations are int32_t in structs and arguments; a value out of range is an error.
 * - Memory is the caller's. A pointer that is not said to be optional must not be null. The library
 *   allocates no device memory; sizes of scratch come from the *_workspace functions.
 * - A handle may be used by several threads as long as none changes or destroys it.
 *
 * C99, and C++. */
#ifndef HOT_C_H
#define HOT_C_H

#include <stddef.h>
#include <stdint.h>

#include "hot/api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors and the build -------------------------------------------------------------------- */

enum {
  HOT_OK = 0,
  HOT_INVALID_ARGUMENT = 1,    /* the text names the argument, its value and the expected one */
  HOT_UNSUPPORTED = 2,         /* valid, but not on this device, in this build or so combined */
  HOT_WORKSPACE_TOO_SMALL = 3, /* the text says how many bytes are needed */
  HOT_CUDA_ERROR = 4,          /* a CUDA call failed; the text has CUDA's own */
  HOT_OUT_OF_MEMORY = 5,       /* of the host */
  HOT_INTERNAL_ERROR = 6       /* a defect of the library */
};
typedef int32_t hot_status;

/* "invalid_argument" and so on; "unknown" for another number. */
HOT_API const char* hot_status_name(hot_status status);

/* Error text of this thread's last failed call, valid until its next failed call; "" before any. */
HOT_API const char* hot_last_error(void);

/* "major.minor.patch" of the library that was linked. */
HOT_API const char* hot_version(void);

/* Whether the library holds CUDA kernels (1 or 0), and the architectures they were compiled for. */
HOT_API int32_t hot_built_with_cuda(void);
HOT_API const char* hot_cuda_architectures(void);

/* ---- arrays ---------------------------------------------------------------------------------- */

enum { HOT_F32 = 0, HOT_F16 = 1, HOT_BF16 = 2, HOT_I8 = 3, HOT_I32 = 4, HOT_I4X2 = 5 }; /* dtype */
enum { HOT_CPU = 0, HOT_CUDA = 1 }; /* device_type */
enum { HOT_MAX_DIMS = 4 };

/* Bytes of one element; 0 for an unknown dtype. HOT_I4X2 is two INT4 in one byte, low nibble first;
 * its shapes and strides count bytes. */
HOT_API size_t hot_dtype_size(int32_t dtype);

/* A strided array of the caller. Strides count elements. Inputs are only read, and may have zero or
 * negative strides. */
typedef struct hot_tensor {
  size_t struct_size;
  void* data;
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  int64_t shape[HOT_MAX_DIMS];
  int64_t stride[HOT_MAX_DIMS];
} hot_tensor;

#define HOT_TENSOR_INIT {sizeof(hot_tensor), 0, 0, 0, 0, 0, {0, 0, 0, 0}, {0, 0, 0, 0}}

/* A contiguous row-major matrix and a contiguous vector on the CPU. */
static inline hot_tensor hot_matrix(void* data, int32_t dtype, int64_t rows, int64_t cols) {
  hot_tensor t = HOT_TENSOR_INIT;
  t.data = data;
  t.dtype = dtype;
  t.ndim = 2;
  t.shape[0] = rows;
  t.shape[1] = cols;
  t.stride[0] = cols;
  t.stride[1] = 1;
  return t;
}
static inline hot_tensor hot_vector(void* data, int32_t dtype, int64_t size) {
  hot_tensor t = HOT_TENSOR_INIT;
  t.data = data;
  t.dtype = dtype;
  t.ndim = 1;
  t.shape[0] = size;
  t.stride[0] = 1;
  return t;
}

/* ---- contexts -------------------------------------------------------------------------------- */

typedef struct hot_context hot_context;

/* The CPU with `threads` threads, 0: one for each core this process may use. */
HOT_API hot_status hot_context_cpu(int32_t threads, hot_context** out);
/* The same with threads of the program: `run` calls work(data) on as many as `threads` threads at
 * the same time, and returns when all calls have returned (hot/context.h, Executor). `state`
 * outlives the context and its copies. */
typedef void (*hot_work)(void* data);
typedef void (*hot_run)(void* state, int threads, hot_work work, void* data);
HOT_API hot_status hot_context_cpu_on(hot_run run, void* state, int32_t threads, hot_context** out);

/* CUDA device `device`; work is queued on `stream` (a cudaStream_t, null: the legacy default
 * stream). */
HOT_API hot_status hot_context_cuda(int32_t device, void* stream, hot_context** out);

/* Another context of the same device, stream or threads (which are shared), key and restrictions.
 */
HOT_API hot_status hot_context_copy(const hot_context* context, hot_context** out);

/* `context` may be null. */
HOT_API void hot_context_destroy(hot_context* context);

/* Sets the random key of the following calls. `stream`, 0 to 8191, distinguishes layers. `counter`
 * is optional: a number in memory of the context's device, aligned to 8 bytes, which is added to
 * `offset` when the work runs (hot::Key in hot/context.h). */
HOT_API hot_status hot_context_set_key(hot_context* context, uint64_t seed, uint64_t offset,
                                       uint32_t stream, const uint64_t* counter);

/* Restrict the CPU to an instruction set, up to the best of this machine and build. */
enum { HOT_ISA_PLAIN = 0, HOT_ISA_AVX2 = 1, HOT_ISA_AVX512 = 2, HOT_ISA_AMX = 3 };
HOT_API int32_t hot_best_isa(void);
HOT_API hot_status hot_context_set_isa(hot_context* context, int32_t isa);

/* Restrict CUDA to the kernels of an architecture: 80, or 0 for the best of the device. */
HOT_API hot_status hot_context_set_arch(hot_context* context, int32_t arch);

/* Threads of a CPU context; 0 for CUDA and for null. */
HOT_API int32_t hot_context_threads(const hot_context* context);

/* ---- configuration of a layer ---------------------------------------------------------------- */

enum { HOT_SCALE_TENSOR = 0, HOT_SCALE_TOKEN = 1, HOT_SCALE_CHANNEL = 2 };
enum { HOT_NEAREST = 0, HOT_STOCHASTIC = 1, HOT_PSEUDO_STOCHASTIC = 2 };
enum { HOT_BASIS_FULL = 0, HOT_BASIS_LOWPASS = 1, HOT_BASIS_SEQUENCY = 2, HOT_BASIS_SKETCH = 3 };
/* gw_scale. */
enum { HOT_GW_SCALE_TENSOR = 0, HOT_GW_SCALE_CHANNEL = 1, HOT_GW_SCALE_TOKEN = 2 };
enum { HOT_STORAGE_INT8 = 0, HOT_STORAGE_INT4 = 1 };
enum { HOT_SIDE_ACTIVATION = 0, HOT_SIDE_GRADIENT = 1 };

/* hot::BackwardLinearSpec, its LowRank included. Filled by hot_spec_recipe; then change fields. */
typedef struct hot_spec {
  size_t struct_size;
  int32_t hadamard_block;
  int32_t gx_bits;
  int32_t gx_scale; /* HOT_SCALE_TOKEN or HOT_SCALE_TENSOR */
  int32_t gx_rounding;
  int32_t basis;
  int32_t block;
  int32_t rank;
  const int32_t* rows; /* of basis lowpass, optional: the rows to keep */
  size_t row_count;
  int32_t grid_h, grid_w, prefix_tokens; /* 0: one flat sequence */
  int32_t gw_scale;                      /* HOT_GW_SCALE_* */
  int32_t gw_rounding;
  int32_t storage;
  int32_t equalize_tokens; /* 0 or 1 */
  int32_t reserved;        /* 0 */
} hot_spec;

#define HOT_SPEC_INIT {sizeof(hot_spec), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* The recipe of that name: "default", "fast", "paper", "accurate".
 * spec->struct_size is read. */
HOT_API hot_status hot_spec_recipe(const char* name, hot_spec* spec);

/* The same fields by name, as hotcore.HotConfig has them, and their values as text: a number,
 * "true" or "false", a choice such as "stochastic", "height,width" of token_grid ("" for none). Set
 * refuses what is no value of the field, and "rows", which is an array of the caller; the
 * combination of all fields is checked by the calls that take the spec. Get writes at most `bytes`
 * with the 0 at the end; 256 are enough for every field. */
HOT_API hot_status hot_spec_set(hot_spec* spec, const char* field, const char* text);
HOT_API hot_status hot_spec_get(const hot_spec* spec, const char* field, char* text, size_t bytes);

/* Name of field `index`; null past the last. */
HOT_API const char* hot_spec_field(int32_t index);

/* Name of recipe `index`; null past the last. */
HOT_API const char* hot_recipe_name(int32_t index);

/* HOT_OK, or HOT_UNSUPPORTED with the reason as hot_last_error(). */
HOT_API hot_status hot_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                                 int64_t in_features, const hot_spec* spec);

/* ---- single stages --------------------------------------------------------------------------- */

HOT_API hot_status hot_fwht(const hot_context* context, const hot_tensor* x, int32_t axis,
                            int32_t block, const hot_tensor* out);

/* `rows` gets `block` numbers. HOT_BASIS_LOWPASS and HOT_BASIS_SEQUENCY only. */
HOT_API hot_status hot_basis_order(int32_t basis, int32_t block, int32_t* rows);

/* Reads the fields from basis to prefix_tokens of `spec`. */
HOT_API hot_status hot_hla_rows(int64_t tokens, const hot_spec* spec, int64_t* rows);
HOT_API hot_status hot_hla(const hot_context* context, const hot_tensor* x, const hot_spec* spec,
                           int32_t side, const hot_tensor* out);

/* `bits` 8 or 4, `granularity` HOT_SCALE_*. `scale` holds 1, R or C elements. */
HOT_API hot_status hot_quantize(const hot_context* context, const hot_tensor* x, int32_t bits,
                                int32_t granularity, int32_t rounding, const hot_tensor* q,
                                const hot_tensor* scale);
HOT_API hot_status hot_dequantize(const hot_context* context, const hot_tensor* q,
                                  const hot_tensor* scale, int32_t granularity,
                                  const hot_tensor* out);

HOT_API hot_status hot_pack_int4(const hot_context* context, const hot_tensor* q,
                                 const hot_tensor* out);
HOT_API hot_status hot_unpack_int4(const hot_context* context, const hot_tensor* packed,
                                   const hot_tensor* out);

/* Both scales are null for the bare sums in an int32 `out`. */
HOT_API hot_status hot_gemm_workspace(const hot_context* context, int64_t m, int64_t n, int64_t k,
                                      size_t* bytes);
HOT_API hot_status hot_gemm_int8(const hot_context* context, const hot_tensor* a,
                                 const hot_tensor* b, const hot_tensor* a_scale,
                                 const hot_tensor* b_scale, int32_t divisor, int32_t accumulate,
                                 const hot_tensor* out, void* workspace, size_t workspace_bytes);
HOT_API hot_status hot_gemm_int4(const hot_context* context, const hot_tensor* a,
                                 const hot_tensor* b, int64_t k, const hot_tensor* a_scale,
                                 const hot_tensor* b_scale, int32_t divisor, int32_t accumulate,
                                 const hot_tensor* out, void* workspace, size_t workspace_bytes);

/* ---- a linear layer -------------------------------------------------------------------------- */

/* Layout of a compressed activation (hot::SavedLayout). */
typedef struct hot_saved_layout {
  size_t struct_size;
  size_t bytes;
  int64_t channels;
  int64_t k;
  int64_t k_padded;
  int64_t row_bytes;
  int64_t scales;
  size_t scale_offset;
  size_t exponent_offset; /* of the tokens' exponents, a byte each, where they are equalised */
} hot_saved_layout;

#define HOT_SAVED_LAYOUT_INIT {sizeof(hot_saved_layout), 0, 0, 0, 0, 0, 0, 0, 0}

/* A compressed activation: what hot_compress_activation filled in, kept until backward. */
typedef struct hot_saved {
  size_t struct_size;
  const void* data;
  size_t bytes;
  int64_t tokens;
  int64_t in_features;
  uint64_t key_seed, key_offset;
  const uint64_t* key_counter;
  uint32_t key_stream;
  uint32_t reserved; /* 0 */
  uint64_t format;   /* of the spec it was made with; backward refuses another */
} hot_saved;

#define HOT_SAVED_INIT {sizeof(hot_saved), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* A quantised weight: what hot_quantize_weight filled in. */
typedef struct hot_weight {
  size_t struct_size;
  const void* data;
  size_t bytes;
  int64_t out_features;
  int64_t in_features;
  uint64_t format;
} hot_weight;

#define HOT_WEIGHT_INIT {sizeof(hot_weight), 0, 0, 0, 0, 0}

/* An x quantised for the forward product: what hot_quantize_forward_input filled in. */
typedef struct hot_input {
  size_t struct_size;
  const void* data;
  size_t bytes;
  int64_t tokens;
  int64_t in_features;
  uint64_t format;
} hot_input;

#define HOT_INPUT_INIT {sizeof(hot_input), 0, 0, 0, 0, 0}

/* Outputs of a backward pass. A null gradient is not computed; at least one is not null. */
typedef struct hot_gradients {
  size_t struct_size;
  const hot_tensor* gx; /* [L, I] */
  const hot_tensor* gw; /* [O, I] */
  const hot_tensor* gb; /* [O] */
  int32_t accumulate;   /* not 0: g_w and g_b are added to the values there */
  int32_t reserved;     /* 0 */
} hot_gradients;

#define HOT_GRADIENTS_INIT {sizeof(hot_gradients), 0, 0, 0, 0, 0}

/* Fills `layout`; reads its struct_size. */
HOT_API hot_status hot_saved_layout_of(int64_t tokens, int64_t in_features, const hot_spec* spec,
                                       hot_saved_layout* layout);

HOT_API hot_status hot_compress_activation_workspace(const hot_context* context, int64_t tokens,
                                                     int64_t in_features, const hot_spec* spec,
                                                     size_t* bytes);

/* Compresses x into `data`, 16-byte aligned, of at least the layout's bytes, and fills `saved` (its
 * struct_size is read). */
HOT_API hot_status hot_compress_activation(const hot_context* context, const hot_tensor* x,
                                           const hot_spec* spec, void* data, size_t bytes,
                                           void* workspace, size_t workspace_bytes,
                                           hot_saved* saved);

/* Decodes tokens `first` to `last` of an x saved with basis full into `out` [last - first, I]. */
HOT_API hot_status hot_decompress_activation(const hot_context* context, const hot_saved* saved,
                                             int64_t first, int64_t last, const hot_spec* spec,
                                             const hot_tensor* out);

HOT_API hot_status hot_quantized_weight_bytes(int64_t out_features, int64_t in_features,
                                              const hot_spec* spec, size_t* bytes);
HOT_API hot_status hot_quantize_weight_workspace(const hot_context* context, int64_t out_features,
                                                 int64_t in_features, const hot_spec* spec,
                                                 size_t* bytes);
/* `data` 16-byte aligned, of exactly hot_quantized_weight_bytes. */
HOT_API hot_status hot_quantize_weight(const hot_context* context, const hot_tensor* w,
                                       const hot_spec* spec, void* data, size_t bytes,
                                       void* workspace, size_t workspace_bytes, hot_weight* weight);

HOT_API hot_status hot_backward_linear_workspace(const hot_context* context, int64_t tokens,
                                                 int64_t out_features, int64_t in_features,
                                                 const hot_spec* spec, int32_t need_gx,
                                                 int32_t need_gw, size_t* bytes);

/* `w` (or `weight`) is needed for gx only, `saved` for gw only; otherwise they may be null. */
HOT_API hot_status hot_backward_linear(const hot_context* context, const hot_tensor* gy,
                                       const hot_tensor* w, const hot_saved* saved,
                                       const hot_spec* spec, const hot_gradients* out,
                                       void* workspace, size_t workspace_bytes);
HOT_API hot_status hot_backward_linear_quantized(const hot_context* context, const hot_tensor* gy,
                                                 const hot_weight* weight, const hot_saved* saved,
                                                 const hot_spec* spec, const hot_gradients* out,
                                                 void* workspace, size_t workspace_bytes);

/* hot::ForwardLinearSpec. */
typedef struct hot_forward_spec {
  size_t struct_size;
  int32_t hadamard_block;
  int32_t reserved; /* 0 */
} hot_forward_spec;

#define HOT_FORWARD_SPEC_INIT {sizeof(hot_forward_spec), 64, 0}

/* HOT_OK, or HOT_UNSUPPORTED with the reason as hot_last_error(). */
HOT_API hot_status hot_forward_supported(const hot_context* context, int64_t tokens,
                                         int64_t out_features, int64_t in_features,
                                         const hot_forward_spec* spec);

HOT_API hot_status hot_forward_weight_bytes(int64_t out_features, int64_t in_features,
                                            const hot_forward_spec* spec, size_t* bytes);
/* `data` 16-byte aligned, of exactly hot_forward_weight_bytes. */
HOT_API hot_status hot_quantize_forward_weight(const hot_context* context, const hot_tensor* w,
                                               const hot_forward_spec* spec, void* data,
                                               size_t bytes, hot_weight* weight);

/* `quantized_weight` not 0: for hot_forward_linear_quantized. */
HOT_API hot_status hot_forward_linear_workspace(const hot_context* context, int64_t tokens,
                                                int64_t out_features, int64_t in_features,
                                                const hot_forward_spec* spec,
                                                int32_t quantized_weight, size_t* bytes);

/* `bias` may be null: none. */
HOT_API hot_status hot_forward_linear(const hot_context* context, const hot_tensor* x,
                                      const hot_tensor* w, const hot_tensor* bias,
                                      const hot_forward_spec* spec, const hot_tensor* y,
                                      void* workspace, size_t workspace_bytes);
HOT_API hot_status hot_forward_linear_quantized(const hot_context* context, const hot_tensor* x,
                                                const hot_weight* weight, const hot_tensor* bias,
                                                const hot_forward_spec* spec, const hot_tensor* y,
                                                void* workspace, size_t workspace_bytes);

HOT_API hot_status hot_forward_input_bytes(int64_t tokens, int64_t in_features,
                                           const hot_forward_spec* spec, size_t* bytes);
/* Quantises x into `data`, 16-byte aligned, of exactly hot_forward_input_bytes, and fills `input`
 * (its struct_size is read). `kept` null: no more, and the arguments after it are not looked at.
 * Otherwise it also does what hot_compress_activation does with the spec `kept`, into `saved_data`;
 * the workspace is hot_compress_activation_workspace of `kept`. */
HOT_API hot_status hot_quantize_forward_input(const hot_context* context, const hot_tensor* x,
                                              const hot_forward_spec* spec, void* data,
                                              size_t bytes, hot_input* input, const hot_spec* kept,
                                              void* saved_data, size_t saved_bytes, void* workspace,
                                              size_t workspace_bytes, hot_saved* saved);

/* For hot_forward_linear_input; `quantized_weight` not 0: with a `weight`. */
HOT_API hot_status hot_forward_linear_input_workspace(const hot_context* context, int64_t tokens,
                                                      int64_t out_features, int64_t in_features,
                                                      const hot_forward_spec* spec,
                                                      int32_t quantized_weight, size_t* bytes);
/* hot_forward_linear with x quantised before; one of `w` and `weight` is null. */
HOT_API hot_status hot_forward_linear_input(const hot_context* context, const hot_input* x,
                                            const hot_tensor* w, const hot_weight* weight,
                                            const hot_tensor* bias, const hot_forward_spec* spec,
                                            const hot_tensor* y, void* workspace,
                                            size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif
