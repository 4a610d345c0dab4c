/* A C11 program that uses nothing but the public C header: calls with results computed by hand,
 * the errors, and what the options' size means. */
#include "problem.h"

static void check_hand_computed(void) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  options.has_softmax_scale = 1;
  options.softmax_scale = 1.0;
  Problem p;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 29) && near(p.out[1], 3));   /* 6/6 - 12/6 + 180/6; 12/6 + 6/6 */
  CHECK(near(p.out[2], 13) && near(p.out[3], 8.5)); /* 24/6 - 6/6 + 60/6; 48/6 + 3/6 */
  CHECK(near(p.lse[0], log(6)) && near(p.lse[1], log(6)));

  options.causal = 1;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], -2) && near(p.out[1], 6)); /* 6/3 - 12/3; 12/3 + 6/3 */
  CHECK(near(p.out[2], 13) && near(p.out[3], 8.5));
  CHECK(near(p.lse[0], log(3)));
}

/* Default options: scale 1 / sqrt(2), every key. A byte_offset and explicit strides count. */
static void check_defaults(void) {
  Problem p;
  make_problem(&p);
  CHECK(run(&p, NULL) == ANYFLASH_OK);
  const double c = sqrt(0.5), w[3] = {1, pow(2, c), pow(3, c)};
  CHECK(near(p.lse[0], log(w[0] + w[1] + w[2])));
  CHECK(near(p.out[0], (6 * w[0] - 6 * w[1] + 60 * w[2]) / (w[0] + w[1] + w[2])));

  Problem same;
  make_problem(&same);
  int64_t strides[4] = {6, 2, 2, 1};
  same.tensor_k.data = &same;
  same.tensor_k.byte_offset = offsetof(Problem, k);
  same.tensor_k.strides = strides;
  CHECK(run(&same, NULL) == ANYFLASH_OK);
  CHECK(memcmp(p.out, same.out, sizeof p.out) == 0);
}

/* Strides that are not those of a contiguous tensor, and bfloat16: the upper half of a float. */
static void check_layouts_and_types(void) {
  Problem p, other;
  make_problem(&p);
  CHECK(run(&p, NULL) == ANYFLASH_OK);
  make_problem(&other);
  float across[6]; /* (columns, keys) */
  for (int i = 0; i < 6; ++i) across[i % 2 * 3 + i / 2] = other.v[i];
  int64_t strides[4] = {6, 1, 6, 3};
  other.tensor_v.data = across;
  other.tensor_v.strides = strides;
  CHECK(run(&other, NULL) == ANYFLASH_OK);
  CHECK(memcmp(p.out, other.out, sizeof p.out) == 0);

  uint16_t q[4] = {0}, k[6] = {0}, v[6], out[4];
  for (int i = 0; i < 6; ++i) {
    uint32_t bits;
    memcpy(&bits, &p.v[i], sizeof bits);
    v[i] = (uint16_t)(bits >> 16);
  }
  make_problem(&other);
  DLTensor* const tensors[4] = {&other.tensor_q, &other.tensor_k, &other.tensor_v,
                                &other.tensor_out};
  void* const memory[4] = {q, k, v, out};
  for (int i = 0; i < 4; ++i) {
    tensors[i]->dtype.code = kDLBfloat;
    tensors[i]->dtype.bits = 16;
    tensors[i]->data = memory[i];
  }
  CHECK(run(&other, NULL) == ANYFLASH_OK); /* the means 20 and 5 */
  CHECK(out[0] == 0x41a0 && out[1] == 0x40a0);
}

static void check_errors(void) {
  Problem p;
  make_problem(&p);
  p.k_shape[0] = 3;
  expect(&p, NULL, ANYFLASH_INVALID_VALUE, "k has shape (3, 3, 1, 2); expected (1, 3, 1, 2)");
  make_problem(&p);
  p.tensor_q.dtype.code = kDLInt;
  expect(&p, NULL, ANYFLASH_INVALID_TYPE, "q is int32; float64, float32, float16 and bfloat16");
  make_problem(&p);
  p.tensor_v.dtype.lanes = 2;
  expect(&p, NULL, ANYFLASH_INVALID_TYPE, "v is float32x2");
  make_problem(&p);
  p.tensor_k.device.device_type = kDLVulkan;
  expect(&p, NULL, ANYFLASH_INVALID_TYPE, "k is on a device of type vulkan;");
  make_problem(&p);
  p.tensor_out.ndim = 5;
  expect(&p, NULL, ANYFLASH_INVALID_VALUE, "out has 5 dimensions; at most 4");
  make_problem(&p);
  p.q_shape[1] = -2;
  expect(&p, NULL, ANYFLASH_INVALID_VALUE,
         "q has shape (1, -2, 1, 2); an extent must not be negative");
  make_problem(&p);
  p.tensor_lse.data = NULL;
  expect(&p, NULL, ANYFLASH_INVALID_VALUE, "lse has a NULL data pointer");

  make_problem(&p);
  size_t bytes = 7;
  CHECK(anyflash_forward_workspace_size(NULL, &p.tensor_k, &p.tensor_v, &p.tensor_out, NULL, NULL,
                                        &bytes) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "q is NULL") != NULL);
  CHECK(bytes == 7);
  CHECK(anyflash_forward_workspace_size(&p.tensor_q, &p.tensor_k, &p.tensor_v, &p.tensor_out, NULL,
                                        NULL, NULL) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "bytes is NULL") != NULL);
  CHECK(anyflash_forward(&p.tensor_q, &p.tensor_k, &p.tensor_v, &p.tensor_out, NULL, NULL, NULL,
                         0) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "workspace has 0 bytes") != NULL);
  CHECK(untouched(&p));
}

/* A caller compiled against a newer header: its struct goes on. */
typedef struct {
  anyflash_forward_options known;
  uint64_t unknown;
} NewerOptions;

static void check_option_sizes(void) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  Problem p, reference;
  options.has_softmax_scale = 1;
  options.softmax_scale = 1.0;
  make_problem(&reference);
  CHECK(run(&reference, &options) == ANYFLASH_OK);

  /* An older caller: what lies behind its struct is not read. */
  options.size = offsetof(anyflash_forward_options, num_threads);
  options.num_threads = -5;
  options.cpu_isa = 99;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(memcmp(p.out, reference.out, sizeof p.out) == 0);
  options.size = sizeof options;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "options.cpu_isa is 99");
  options.cpu_isa = 0;
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "num_threads is -5");

  /* A caller of the first version, whose struct ended before the windows. */
  options.num_threads = 0;
  options.causal = 0;
  options.size = offsetof(anyflash_forward_options, has_window_left);
  memset(&options.has_window_left, 0xab,
         sizeof options - offsetof(anyflash_forward_options, has_window_left));
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(memcmp(p.out, reference.out, sizeof p.out) == 0);

  options.size = 0; /* not initialised */
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "options.size is 0");
  options.size = offsetof(anyflash_forward_options, stream) + 4; /* half a pointer */
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "options.size is 36; it must be sizeof");

  NewerOptions newer = {ANYFLASH_FORWARD_OPTIONS_INIT, 0};
  newer.known.size = sizeof newer;
  newer.known.has_softmax_scale = 1;
  newer.known.softmax_scale = 1.0;
  CHECK(run(&p, &newer.known) == ANYFLASH_OK);
  CHECK(memcmp(p.out, reference.out, sizeof p.out) == 0);
  make_problem(&p);
  newer.unknown = (uint64_t)1 << 63;
  expect(&p, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
  newer.unknown = 0;
  newer.known.reserved = 1;
  expect(&p, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
}

int main(void) {
  CHECK(strcmp(anyflash_last_error(), "") == 0);
  CHECK(strcmp(anyflash_version(), ANYFLASH_VERSION_STRING) == 0);
  CHECK(anyflash_kernel_count() > 0);
  CHECK(anyflash_kernel_name(anyflash_kernel_count()) == NULL);
  CHECK(anyflash_kernel_launches(anyflash_kernel_count()) == 0);
  CHECK(anyflash_kernel_name((size_t)1 << 40) == NULL);
  CHECK(anyflash_kernel_launches((size_t)1 << 40) == 0);
  check_hand_computed();
  check_defaults();
  check_layouts_and_types();
  check_errors();
  check_option_sizes();
  if (failures == 0) puts("all checks passed");
  return failures != 0;
}
