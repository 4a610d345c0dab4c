/* A C11 program that uses nothing but the public C header: calls with results computed by hand,
 * the errors, and what the options' size means. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyflash/anyflash.h"
#include "anyflash/version.h"

static int failures = 0;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      printf("  last error: %s\n", anyflash_last_error());           \
      ++failures;                                                    \
    }                                                                \
  } while (0)

/* 1 batch, 2 queries, 3 keys, 1 head, head dim 2. With scale 1 and keys that give the scores
 *   query 0: ln 1, ln 2, ln 3         query 1: ln 4, 0, 0
 * the probabilities are 1/6, 2/6, 3/6 and 4/6, 1/6, 1/6; causal, query 0 sees keys 0 and 1, with
 * 1/3 and 2/3. */
typedef struct {
  float q[4], k[6], v[6], out[4], lse[2];
  int64_t q_shape[4], k_shape[4], lse_shape[3];
  DLTensor tensor_q, tensor_k, tensor_v, tensor_out, tensor_lse;
} Problem;

static DLTensor tensor(float* data, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static void make_problem(Problem* p) {
  const float q[4] = {1, 0, 0, 1};
  const float k[6] = {0, 1.3862943611f, 0.6931471806f, 0, 1.0986122887f, 0};
  const float v[6] = {6, 12, -6, 3, 60, 0};
  const int64_t q_shape[4] = {1, 2, 1, 2}, k_shape[4] = {1, 3, 1, 2}, lse_shape[3] = {1, 1, 2};
  memcpy(p->q, q, sizeof q);
  memcpy(p->k, k, sizeof k);
  memcpy(p->v, v, sizeof v);
  for (int i = 0; i < 4; ++i) p->out[i] = -77;
  for (int i = 0; i < 2; ++i) p->lse[i] = -77;
  memcpy(p->q_shape, q_shape, sizeof q_shape);
  memcpy(p->k_shape, k_shape, sizeof k_shape);
  memcpy(p->lse_shape, lse_shape, sizeof lse_shape);
  p->tensor_q = tensor(p->q, 4, p->q_shape);
  p->tensor_k = tensor(p->k, 4, p->k_shape);
  p->tensor_v = tensor(p->v, 4, p->k_shape);
  p->tensor_out = tensor(p->out, 4, p->q_shape);
  p->tensor_lse = tensor(p->lse, 3, p->lse_shape);
}

static int untouched(const Problem* p) {
  for (int i = 0; i < 4; ++i) {
    if (p->out[i] != -77 || p->lse[i / 2] != -77) return 0;
  }
  return 1;
}

static anyflash_status run(Problem* p, const anyflash_forward_options* options) {
  size_t bytes = 0;
  anyflash_status status = anyflash_forward_workspace_size(
      &p->tensor_q, &p->tensor_k, &p->tensor_v, &p->tensor_out, &p->tensor_lse, options, &bytes);
  if (status != ANYFLASH_OK) return status;
  void* const workspace = aligned_alloc(256, (bytes + 511) / 256 * 256);
  status = anyflash_forward(&p->tensor_q, &p->tensor_k, &p->tensor_v, &p->tensor_out,
                            &p->tensor_lse, options, workspace, bytes);
  free(workspace);
  return status;
}

static int near(float a, double b) { return fabs(a - b) < 2e-5; }

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

static void expect(Problem* p, const anyflash_forward_options* options, anyflash_status status,
                   const char* words) {
  CHECK(run(p, options) == status);
  CHECK(strstr(anyflash_last_error(), "anyflash_forward") == anyflash_last_error());
  CHECK(strstr(anyflash_last_error(), words) != NULL);
  CHECK(untouched(p));
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
  expect(&p, NULL, ANYFLASH_INVALID_TYPE, "k is on a device of DLPack type 7");
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
  options.size = offsetof(anyflash_forward_options, causal);
  options.causal = 1;
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

  options.size = 0; /* not initialised */
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "options.size is 0");

  NewerOptions newer = {ANYFLASH_FORWARD_OPTIONS_INIT, 0};
  newer.known.size = sizeof newer;
  newer.known.has_softmax_scale = 1;
  newer.known.softmax_scale = 1.0;
  CHECK(run(&p, &newer.known) == ANYFLASH_OK);
  CHECK(memcmp(p.out, reference.out, sizeof p.out) == 0);
  make_problem(&p);
  newer.unknown = (uint64_t)1 << 63;
  expect(&p, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
}

int main(void) {
  CHECK(strcmp(anyflash_last_error(), "") == 0);
  CHECK(strcmp(anyflash_version(), ANYFLASH_VERSION_STRING) == 0);
  CHECK(anyflash_kernel_count() > 0);
  CHECK(anyflash_kernel_name(anyflash_kernel_count()) == NULL);
  CHECK(anyflash_kernel_launches(anyflash_kernel_count()) == 0);
  check_hand_computed();
  check_defaults();
  check_errors();
  check_option_sizes();
  if (failures == 0) puts("all checks passed");
  return failures != 0;
}
