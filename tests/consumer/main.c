/* Backward of a linear layer through hot/hot_c.h, compared with a plain product. Also an error and
 * the sizes of the structs. Pure C99. */
#include <hot/hot_c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { L = 50, O = 24, I = 40 };

static float gy[L * O], x[L * I], w[O * I], gx[L * I], gw[O * I], gb[O];

static void waves(float* values, int count, double step) {
  int i;
  for (i = 0; i < count; ++i) values[i] = (float)sin(step * (double)(i * i % 1009));
}

static void check(hot_status status) {
  if (status == HOT_OK) return;
  fprintf(stderr, "%s: %s\n", hot_status_name(status), hot_last_error());
  exit(1);
}

/* malloc's memory is aligned to 16 bytes. */
static void* memory(size_t bytes) {
  void* data = malloc(bytes > 0 ? bytes : 1);
  if (data == NULL) exit(1);
  return data;
}

static double distance_of_gw(void) {
  double error = 0, norm = 0;
  int o, i, l;
  for (o = 0; o < O; ++o) {
    for (i = 0; i < I; ++i) {
      double sum = 0, d;
      for (l = 0; l < L; ++l) sum += (double)gy[l * O + o] * (double)x[l * I + i];
      d = (double)gw[o * I + i] - sum;
      error += d * d;
      norm += sum * sum;
    }
  }
  return sqrt(error / norm);
}

int main(void) {
  hot_context* context = NULL;
  hot_spec spec = HOT_SPEC_INIT;
  hot_saved_layout layout = HOT_SAVED_LAYOUT_INIT;
  hot_saved saved = HOT_SAVED_INIT;
  hot_gradients out = HOT_GRADIENTS_INIT;
  hot_tensor to_gx = hot_matrix(gx, HOT_F32, L, I), to_gw = hot_matrix(gw, HOT_F32, O, I),
             to_gb = hot_vector(gb, HOT_F32, O), from_gy = hot_matrix(gy, HOT_F32, L, O),
             from_w = hot_matrix(w, HOT_F32, O, I), from_x = hot_matrix(x, HOT_F32, L, I);
  void *kept, *scratch;
  size_t forward = 0, backward = 0;
  hot_status status;
  double error;

  waves(gy, L * O, 0.37);
  waves(x, L * I, 0.53);
  waves(w, O * I, 0.71);

  check(hot_context_cpu(2, &context));
  check(hot_context_set_key(context, 1, 2, 3, NULL));
  check(hot_spec_recipe("accurate", &spec));
  check(hot_supported(context, L, O, I, &spec));

  check(hot_saved_layout_of(L, I, &spec, &layout));
  check(hot_compress_activation_workspace(context, L, I, &spec, &forward));
  check(hot_backward_linear_workspace(context, L, O, I, &spec, 1, 1, &backward));
  kept = memory(layout.bytes);
  scratch = memory(forward > backward ? forward : backward);
  check(hot_compress_activation(context, &from_x, &spec, kept, layout.bytes, scratch, forward,
                                &saved));
  out.gx = &to_gx;
  out.gw = &to_gw;
  out.gb = &to_gb;
  check(hot_backward_linear(context, &from_gy, &from_w, &saved, &spec, &out, scratch, backward));
  error = distance_of_gw();
  printf("libhot %s: g_w relative error %.5f (limit 0.03)\n", hot_version(), error);
  if (!(error < 0.03)) return 1;

  status = hot_fwht(context, &from_gy, 0, 7, &to_gx);
  if (status != HOT_INVALID_ARGUMENT || strstr(hot_last_error(), "block is 7") == NULL) return 1;
  printf("expected error: %s\n", hot_last_error());

  hot_context_destroy(context);
  free(kept);
  free(scratch);
  printf("sizes:");
  printf(" hot_tensor %u", (unsigned)sizeof(hot_tensor));
  printf(" hot_spec %u", (unsigned)sizeof(hot_spec));
  printf(" hot_saved_layout %u", (unsigned)sizeof(hot_saved_layout));
  printf(" hot_saved %u", (unsigned)sizeof(hot_saved));
  printf(" hot_weight %u", (unsigned)sizeof(hot_weight));
  printf(" hot_input %u", (unsigned)sizeof(hot_input));
  printf(" hot_gradients %u", (unsigned)sizeof(hot_gradients));
  printf(" hot_forward_spec %u\n", (unsigned)sizeof(hot_forward_spec));
  return 0;
}
