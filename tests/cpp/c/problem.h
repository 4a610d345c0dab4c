/* A problem whose results can be computed by hand, for the C programs. */
#ifndef ANYFLASH_TESTS_CPP_C_PROBLEM_H_
#define ANYFLASH_TESTS_CPP_C_PROBLEM_H_

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

static inline DLTensor tensor(void* data, int ndim, int64_t* shape) {
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

static inline void make_problem(Problem* p) {
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

static inline int untouched(const Problem* p) {
  for (int i = 0; i < 4; ++i) {
    if (p->out[i] != -77 || p->lse[i / 2] != -77) return 0;
  }
  return 1;
}

static inline anyflash_status run(Problem* p, const anyflash_forward_options* options) {
  size_t bytes = 0;
  anyflash_status status = anyflash_forward_workspace_size(
      &p->tensor_q, &p->tensor_k, &p->tensor_v, &p->tensor_out, &p->tensor_lse, options, &bytes);
  if (status != ANYFLASH_OK) return status;
  void* const workspace = malloc(bytes);
  status = anyflash_forward(&p->tensor_q, &p->tensor_k, &p->tensor_v, &p->tensor_out,
                            &p->tensor_lse, options, workspace, bytes);
  free(workspace);
  return status;
}

static inline int near(float a, double b) { return fabs(a - b) < 2e-5; }

static inline void expect(Problem* p, const anyflash_forward_options* options,
                          anyflash_status status, const char* words) {
  CHECK(run(p, options) == status);
  CHECK(strstr(anyflash_last_error(), "anyflash_forward") == anyflash_last_error());
  CHECK(strstr(anyflash_last_error(), words) != NULL);
  CHECK(untouched(p));
}

static inline DLTensor typed(void* data, int ndim, int64_t* shape, uint8_t code, uint8_t bits) {
  DLTensor t = tensor(data, ndim, shape);
  t.dtype.code = code;
  t.dtype.bits = bits;
  return t;
}

#endif /* ANYFLASH_TESTS_CPP_C_PROBLEM_H_ */
