/* libhot for C and for every language that can call C. It has the same functions as hot/hot.h. The
 * C++ headers document each stage: shapes, dtypes and errors. docs/numerics.md defines the bits.
 *
 * - A function that can fail returns a hot_status: HOT_OK or the kind of error. After an error
 *   hot_last_error() returns the text, and no output was written. No C++ exception leaves the
 *   library.
 * - Contexts are opaque handles. All other arguments are plain structs of the caller. Their first
 *   member is struct_size, the sizeof of the struct (set by the HOT_*_INIT macros).
 * - Later versions add members at the end and still accept shorter structs of earlier versions. A
 *   longer struct is refused unless the members that this library lacks are zero.
 * - Enumerations are int32_t in structs and arguments. A value out of range is an error.
 * - The caller owns all memory. Pointers must not be null unless documented as optional. The
 *   library allocates no device memory; the *_workspace functions return the sizes of scratch.
 * - Several threads may use a handle as long as none changes or destroys it.
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
  HOT_INVALID_ARGUMENT = 1,    /* the text names the argument, its value and the expected value */
  HOT_UNSUPPORTED = 2,         /* valid, but not on this device, in this build or combination */
  HOT_WORKSPACE_TOO_SMALL = 3, /* the text states the required bytes */
  HOT_CUDA_ERROR = 4,          /* a CUDA call failed; the text contains CUDA's message */
  HOT_OUT_OF_MEMORY = 5,       /* host memory */
  HOT_INTERNAL_ERROR = 6       /* a bug in the library */
};
typedef int32_t hot_status;

/* Name of a status, for example "invalid_argument"; "unknown" for an unknown number. */
HOT_API const char* hot_status_name(hot_status status);

/* Error text of this thread's last failed call, valid until its next failed call; initially "". */
HOT_API const char* hot_last_error(void);

/* Version of the linked library, "major.minor.patch". */
HOT_API const char* hot_version(void);

/* CUDA support of this build (1 or 0), and the architectures of its kernels ("" without CUDA). */
HOT_API int32_t hot_built_with_cuda(void);
HOT_API const char* hot_cuda_architectures(void);

/* ---- arrays ---------------------------------------------------------------------------------- */

enum { HOT_F32 = 0, HOT_F16 = 1, HOT_BF16 = 2, HOT_I8 = 3, HOT_I32 = 4, HOT_I4X2 = 5 }; /* dtype */
enum { HOT_CPU = 0, HOT_CUDA = 1 }; /* device_type */
enum { HOT_MAX_DIMS = 4 };

/* Bytes of one element; 0 for an unknown dtype. HOT_I4X2 holds two INT4 per byte, low nibble first.
 * Its shapes and strides count bytes. */
HOT_API size_t hot_dtype_size(int32_t dtype);

/* A strided array of the caller. Strides count elements; those of inputs may be zero or negative.
 * The library does not write to inputs. */
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

/* Views of a contiguous row-major matrix and of a contiguous vector on the CPU. */
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

/* Context of the CPU with `threads` threads (0: one per core that this process may use). */
HOT_API hot_status hot_context_cpu(int32_t threads, hot_context** out);
/* Context of the CPU on threads of the program. `run` calls work(data) on up to `threads` threads
 * at the same time and returns when all calls have returned (hot/context.h, Executor). `state` must
 * outlive the context and its copies. */
typedef void (*hot_work)(void* data);
typedef void (*hot_run)(void* state, int threads, hot_work work, void* data);
HOT_API hot_status hot_context_cpu_on(hot_run run, void* state, int32_t threads, hot_context** out);

/* Context of CUDA device `device`, which queues work on `stream` (a cudaStream_t; null: the legacy
 * default stream). */
HOT_API hot_status hot_context_cuda(int32_t device, void* stream, hot_context** out);

/* Copy of a context: same device, stream, key and restrictions. Copies share their threads. */
HOT_API hot_status hot_context_copy(const hot_context* context, hot_context** out);

/* `context` may be null. */
HOT_API void hot_context_destroy(hot_context* context);

/* Sets the random key of the following calls. `stream`, 0 to 8191, distinguishes layers. `counter`
 * is optional. It points to a number in memory of the context's device, aligned to 8 bytes, which
 * is added to `offset` when the work runs (hot::Key in hot/context.h). */
HOT_API hot_status hot_context_set_key(hot_context* context, uint64_t seed, uint64_t offset,
                                       uint32_t stream, const uint64_t* counter);

/* Restricts the CPU to an instruction set, at most hot_best_isa(). */
enum { HOT_ISA_PLAIN = 0, HOT_ISA_AVX2 = 1, HOT_ISA_AVX512 = 2, HOT_ISA_AMX = 3 };
HOT_API int32_t hot_best_isa(void);
HOT_API hot_status hot_context_set_isa(hot_context* context, int32_t isa);

/* Restricts CUDA to the kernels of an architecture: 80, or 0 for the best of the device. */
HOT_API hot_status hot_context_set_arch(hot_context* context, int32_t arch);

/* Leaves `sms` multiprocessors to other work (Context::with_sm_margin). Sizes of workspaces may
 * change with it. */
HOT_API hot_status hot_context_set_sm_margin(hot_context* context, int32_t sms);

/* Threads of a CPU context; 0 for CUDA and for null. */
HOT_API int32_t hot_context_threads(const hot_context* context);

/* ---- configuration of a layer ---------------------------------------------------------------- */

enum { HOT_SCALE_TENSOR = 0, HOT_SCALE_TOKEN = 1, HOT_SCALE_CHANNEL = 2 };
enum { HOT_NEAREST = 0, HOT_STOCHASTIC = 1, HOT_PSEUDO_STOCHASTIC = 2 };
enum { HOT_BASIS_FULL = 0, HOT_BASIS_LOWPASS = 1, HOT_BASIS_SEQUENCY = 2, HOT_BASIS_SKETCH = 3 };
/* Numbers of gw_scale. */
enum { HOT_GW_SCALE_TENSOR = 0, HOT_GW_SCALE_CHANNEL = 1, HOT_GW_SCALE_TOKEN = 2 };
enum { HOT_STORAGE_INT8 = 0, HOT_STORAGE_INT4 = 1 };
enum { HOT_SIDE_ACTIVATION = 0, HOT_SIDE_GRADIENT = 1 };

/* hot::BackwardLinearSpec with its LowRank. Fill it by hot_spec_recipe, then change fields. */
typedef struct hot_spec {
  size_t struct_size;
  int32_t hadamard_block;
  int32_t gx_bits;
  int32_t gx_scale; /* HOT_SCALE_TOKEN or HOT_SCALE_TENSOR */
  int32_t gx_rounding;
  int32_t basis;
  int32_t block;
  int32_t rank;
  const int32_t* rows; /* optional, for basis lowpass: the rows to keep */
  size_t row_count;
  int32_t grid_h, grid_w, prefix_tokens; /* 0: one flat sequence */
  int32_t gw_scale;                      /* HOT_GW_SCALE_* */
  int32_t gw_rounding;
  int32_t storage;
  int32_t equalize_tokens; /* 0 or 1 */
  int32_t reserved;        /* 0 */
} hot_spec;

#define HOT_SPEC_INIT {sizeof(hot_spec), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* Fills `spec` with a recipe: "default", "fast", "paper" or "accurate". Reads spec->struct_size. */
HOT_API hot_status hot_spec_recipe(const char* name, hot_spec* spec);

/* Set and get a field by its name in hotcore.HotConfig. Values are text: a number, "true" or
 * "false", a choice such as "stochastic", or "height,width" for token_grid ("" for none). Set
 * refuses texts of another type, and "rows", which is an array of the caller. The calls that take
 * the spec check ranges and combinations. Get writes at most `bytes` bytes with the final 0; 256
 * bytes are enough for every field. */
HOT_API hot_status hot_spec_set(hot_spec* spec, const char* field, const char* text);
HOT_API hot_status hot_spec_get(const hot_spec* spec, const char* field, char* text, size_t bytes);

/* Name of field `index`; null past the last. */
HOT_API const char* hot_spec_field(int32_t index);

/* Name of recipe `index`; null past the last. */
HOT_API const char* hot_recipe_name(int32_t index);

/* Returns HOT_OK, or HOT_UNSUPPORTED with the reason in hot_last_error(). */
HOT_API hot_status hot_supported(const hot_context* context, int64_t tokens, int64_t out_features,
                                 int64_t in_features, const hot_spec* spec);

/* ---- single stages --------------------------------------------------------------------------- */

HOT_API hot_status hot_fwht(const hot_context* context, const hot_tensor* x, int32_t axis,
                            int32_t block, const hot_tensor* out);

/* Writes `block` numbers to `rows`. HOT_BASIS_LOWPASS and HOT_BASIS_SEQUENCY only. */
HOT_API hot_status hot_basis_order(int32_t basis, int32_t block, int32_t* rows);

/* Both functions read the fields of `spec` from basis to prefix_tokens. */
HOT_API hot_status hot_hla_rows(int64_t tokens, const hot_spec* spec, int64_t* rows);
HOT_API hot_status hot_hla(const hot_context* context, const hot_tensor* x, const hot_spec* spec,
                           int32_t side, const hot_tensor* out);

/* `bits` is 8 or 4, `granularity` one of HOT_SCALE_*. `scale` holds 1, R or C elements. */
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

/* `wire` has rows of 68 bytes for each block of 64 values: [bytes] or [parts, bytes], and for a sum
   [ranks, bytes] or [ranks, parts, bytes]. */
HOT_API hot_status hot_encode_blocks(const hot_context* context, const hot_tensor* x,
                                     int32_t rounding, const hot_tensor* wire);
HOT_API hot_status hot_sum_blocks(const hot_context* context, const hot_tensor* wire, float factor,
                                  const hot_tensor* out);

/* Both scales are null for unscaled sums in an int32 `out`. */
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
  size_t exponent_offset; /* start of the token exponents (one byte each) of equalised tokens */
} hot_saved_layout;

#define HOT_SAVED_LAYOUT_INIT {sizeof(hot_saved_layout), 0, 0, 0, 0, 0, 0, 0, 0}

/* A compressed activation, filled by hot_compress_activation and kept until backward. */
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
  uint64_t format;   /* identifies the spec; backward refuses another format */
} hot_saved;

#define HOT_SAVED_INIT {sizeof(hot_saved), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* A quantised weight, filled by hot_quantize_weight. */
typedef struct hot_weight {
  size_t struct_size;
  const void* data;
  size_t bytes;
  int64_t out_features;
  int64_t in_features;
  uint64_t format;
} hot_weight;

#define HOT_WEIGHT_INIT {sizeof(hot_weight), 0, 0, 0, 0, 0}

/* An x quantised for the forward product, filled by hot_quantize_forward_input. */
typedef struct hot_input {
  size_t struct_size;
  const void* data;
  size_t bytes;
  int64_t tokens;
  int64_t in_features;
  uint64_t format;
} hot_input;

#define HOT_INPUT_INIT {sizeof(hot_input), 0, 0, 0, 0, 0}

/* Outputs of a backward pass. A null gradient is not computed; at least one must not be null. */
typedef struct hot_gradients {
  size_t struct_size;
  const hot_tensor* gx; /* [L, I] */
  const hot_tensor* gw; /* [O, I] */
  const hot_tensor* gb; /* [O] */
  int32_t accumulate;   /* not 0: adds g_w and g_b to the values in their arrays */
  int32_t reserved;     /* 0 */
} hot_gradients;

#define HOT_GRADIENTS_INIT {sizeof(hot_gradients), 0, 0, 0, 0, 0}

/* Fills `layout`. Reads its struct_size. */
HOT_API hot_status hot_saved_layout_of(int64_t tokens, int64_t in_features, const hot_spec* spec,
                                       hot_saved_layout* layout);

HOT_API hot_status hot_compress_activation_workspace(const hot_context* context, int64_t tokens,
                                                     int64_t in_features, const hot_spec* spec,
                                                     size_t* bytes);

/* Compresses x into `data` (16-byte aligned, at least the bytes of the layout) and fills `saved`.
 * Reads saved->struct_size. */
HOT_API hot_status hot_compress_activation(const hot_context* context, const hot_tensor* x,
                                           const hot_spec* spec, void* data, size_t bytes,
                                           void* workspace, size_t workspace_bytes,
                                           hot_saved* saved);

/* Decodes tokens [first, last) of an x saved with basis full into `out` [last - first, I]. */
HOT_API hot_status hot_decompress_activation(const hot_context* context, const hot_saved* saved,
                                             int64_t first, int64_t last, const hot_spec* spec,
                                             const hot_tensor* out);

HOT_API hot_status hot_quantized_weight_bytes(int64_t out_features, int64_t in_features,
                                              const hot_spec* spec, size_t* bytes);
HOT_API hot_status hot_quantize_weight_workspace(const hot_context* context, int64_t out_features,
                                                 int64_t in_features, const hot_spec* spec,
                                                 size_t* bytes);
/* `data` is 16-byte aligned and has exactly hot_quantized_weight_bytes bytes. */
HOT_API hot_status hot_quantize_weight(const hot_context* context, const hot_tensor* w,
                                       const hot_spec* spec, void* data, size_t bytes,
                                       void* workspace, size_t workspace_bytes, hot_weight* weight);

HOT_API hot_status hot_backward_linear_workspace(const hot_context* context, int64_t tokens,
                                                 int64_t out_features, int64_t in_features,
                                                 const hot_spec* spec, int32_t need_gx,
                                                 int32_t need_gw, size_t* bytes);

/* `w` (or `weight`) is needed for gx only, and `saved` for gw only. Otherwise they may be null. */
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

/* Returns HOT_OK, or HOT_UNSUPPORTED with the reason in hot_last_error(). */
HOT_API hot_status hot_forward_supported(const hot_context* context, int64_t tokens,
                                         int64_t out_features, int64_t in_features,
                                         const hot_forward_spec* spec);

HOT_API hot_status hot_forward_weight_bytes(int64_t out_features, int64_t in_features,
                                            const hot_forward_spec* spec, size_t* bytes);
/* `data` is 16-byte aligned and has exactly hot_forward_weight_bytes bytes. */
HOT_API hot_status hot_quantize_forward_weight(const hot_context* context, const hot_tensor* w,
                                               const hot_forward_spec* spec, void* data,
                                               size_t bytes, hot_weight* weight);

/* Set `quantized_weight` for hot_forward_linear_quantized. */
HOT_API hot_status hot_forward_linear_workspace(const hot_context* context, int64_t tokens,
                                                int64_t out_features, int64_t in_features,
                                                const hot_forward_spec* spec,
                                                int32_t quantized_weight, size_t* bytes);

/* `bias` is optional. */
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
/* Quantises x into `data` (16-byte aligned, exactly hot_forward_input_bytes bytes) and fills
 * `input`. Reads input->struct_size. If `kept` is null, the arguments after it are ignored.
 * Otherwise the call also performs hot_compress_activation with the spec `kept` into `saved_data`.
 * Its workspace is hot_compress_activation_workspace of `kept`. */
HOT_API hot_status hot_quantize_forward_input(const hot_context* context, const hot_tensor* x,
                                              const hot_forward_spec* spec, void* data,
                                              size_t bytes, hot_input* input, const hot_spec* kept,
                                              void* saved_data, size_t saved_bytes, void* workspace,
                                              size_t workspace_bytes, hot_saved* saved);

/* The same with `exponents`, an int8 vector [I], contiguous and 16-byte aligned: feature i of x is
 * divided by 2^(exponents[i] / 4) before the transform (hot/forward_linear.h). Null: none. */
HOT_API hot_status hot_quantize_forward_input_scaled(
    const hot_context* context, const hot_tensor* x, const hot_tensor* exponents,
    const hot_forward_spec* spec, void* data, size_t bytes, hot_input* input, const hot_spec* kept,
    void* saved_data, size_t saved_bytes, void* workspace, size_t workspace_bytes,
    hot_saved* saved);

/* Workspace of hot_forward_linear_input. Set `quantized_weight` if the call gets a `weight`. */
HOT_API hot_status hot_forward_linear_input_workspace(const hot_context* context, int64_t tokens,
                                                      int64_t out_features, int64_t in_features,
                                                      const hot_forward_spec* spec,
                                                      int32_t quantized_weight, size_t* bytes);
/* hot_forward_linear for an x from hot_quantize_forward_input. One of `w` and `weight` is null. */
HOT_API hot_status hot_forward_linear_input(const hot_context* context, const hot_input* x,
                                            const hot_tensor* w, const hot_weight* weight,
                                            const hot_tensor* bias, const hot_forward_spec* spec,
                                            const hot_tensor* y, void* workspace,
                                            size_t workspace_bytes);

/* ---- a weight in INT4 (hot/weight_int4.h) ---------------------------------------------------- */

/* `group` is 32 or 64. */
HOT_API hot_status hot_weight_int4_bytes(int64_t out_features, int64_t in_features,
                                         const hot_forward_spec* spec, int32_t group,
                                         size_t* bytes);
/* `data` is 16-byte aligned and has exactly hot_weight_int4_bytes bytes. `exponents` is optional:
 * feature i of w is multiplied by 2^(exponents[i] / 4), and x must be divided by the same. */
HOT_API hot_status hot_quantize_weight_int4(const hot_context* context, const hot_tensor* w,
                                            const hot_tensor* exponents,
                                            const hot_forward_spec* spec, int32_t group, void* data,
                                            size_t bytes, hot_weight* weight);
/* Fills `expanded` as hot_quantize_forward_weight does. `data` is 16-byte aligned and has exactly
 * hot_forward_weight_bytes bytes. */
HOT_API hot_status hot_expand_weight_int4(const hot_context* context, const hot_weight* weight,
                                          const hot_forward_spec* spec, int32_t group, void* data,
                                          size_t bytes, hot_weight* expanded);

/* Makes floats `out` [O, I] of INT8 codes; `exponents` is optional. */
HOT_API hot_status hot_dequantize_weight(const hot_context* context, const hot_weight* weight,
                                         const hot_forward_spec* spec, const hot_tensor* exponents,
                                         const hot_tensor* out);

#ifdef __cplusplus
}
#endif

#endif
