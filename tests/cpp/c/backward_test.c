/* A C11 program: anyflash_backward with results computed by hand, its options and its errors. */
#include "problem.h"

/* problem.h's problem after the forward, and a gradient of its results: row 0 of dout is (1, 0),
 * row 1 is (0, 1). */
typedef struct {
  Problem p;
  float dout[4], dq[4], dk[6], dv[6];
  DLTensor tensor_dout, tensor_dq, tensor_dk, tensor_dv;
} Gradients;

static anyflash_forward_options scale_one(void) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  options.has_softmax_scale = 1;
  options.softmax_scale = 1.0;
  return options;
}

static void make_gradients(Gradients* g, const anyflash_forward_options* options) {
  const float dout[4] = {1, 0, 0, 1};
  make_problem(&g->p);
  CHECK(run(&g->p, options) == ANYFLASH_OK);
  memcpy(g->dout, dout, sizeof dout);
  for (int i = 0; i < 6; ++i) g->dk[i] = g->dv[i] = g->dq[i / 2] = -77;
  g->dq[3] = -77;
  g->tensor_dout = tensor(g->dout, 4, g->p.q_shape);
  g->tensor_dq = tensor(g->dq, 4, g->p.q_shape);
  g->tensor_dk = tensor(g->dk, 4, g->p.k_shape);
  g->tensor_dv = tensor(g->dv, 4, g->p.k_shape);
}

static int no_gradients(const Gradients* g) {
  for (int i = 0; i < 6; ++i) {
    if (g->dk[i] != -77 || g->dv[i] != -77 || g->dq[i % 4] != -77) return 0;
  }
  return 1;
}

static anyflash_status run_backward(Gradients* g, const anyflash_forward_options* options,
                                    const anyflash_backward_options* backward_options) {
  Problem* const p = &g->p;
  size_t bytes = 0;
  anyflash_status status = anyflash_backward_workspace_size(
      &g->tensor_dout, &p->tensor_q, &p->tensor_k, &p->tensor_v, &p->tensor_out, &p->tensor_lse,
      &g->tensor_dq, &g->tensor_dk, &g->tensor_dv, options, backward_options, &bytes);
  if (status != ANYFLASH_OK) return status;
  void* const workspace = malloc(bytes);
  status = anyflash_backward(&g->tensor_dout, &p->tensor_q, &p->tensor_k, &p->tensor_v,
                             &p->tensor_out, &p->tensor_lse, &g->tensor_dq, &g->tensor_dk,
                             &g->tensor_dv, options, backward_options, workspace, bytes);
  free(workspace);
  return status;
}

static void expect_backward(Gradients* g, const anyflash_forward_options* options,
                            const anyflash_backward_options* backward_options,
                            anyflash_status status, const char* words) {
  CHECK(run_backward(g, options, backward_options) == status);
  CHECK(strstr(anyflash_last_error(), "anyflash_backward") == anyflash_last_error());
  CHECK(strstr(anyflash_last_error(), words) != NULL);
  CHECK(no_gradients(g));
}

/* dS of probabilities p, dP = d and delta, and what follows of it. `shift` is added to dP - delta.
 */
static void check_gradients(const Gradients* g, const double p[2][3], const double delta[2],
                            double shift) {
  const double d[2][3] = {{6, -6, 60}, {12, 3, 0}};
  const double k[3][2] = {{0, log(4)}, {log(2), 0}, {log(3), 0}};
  for (int i = 0; i < 2; ++i) {
    double dq[2] = {0, 0};
    for (int j = 0; j < 3; ++j) {
      const double ds = p[i][j] * (d[i][j] - delta[i] + shift);
      dq[0] += ds * k[j][0];
      dq[1] += ds * k[j][1];
      /* Row i of q and of dout is the unit vector i. */
      CHECK(near(g->dk[2 * j + i], ds));
      CHECK(near(g->dv[2 * j + i], p[i][j]));
    }
    CHECK(near(g->dq[2 * i], dq[0]) && near(g->dq[2 * i + 1], dq[1]));
  }
}

static const double kFull[2][3] = {{1 / 6.0, 2 / 6.0, 3 / 6.0}, {4 / 6.0, 1 / 6.0, 1 / 6.0}};
static const double kCausal[2][3] = {{1 / 3.0, 2 / 3.0, 0}, {4 / 6.0, 1 / 6.0, 1 / 6.0}};

static void check_hand_computed(void) {
  Gradients g;
  anyflash_forward_options options = scale_one();
  const double delta[2] = {29, 8.5};
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, NULL) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 0);
  CHECK(near(g.dk[0], -23 / 6.0) && near(g.dk[2], -70 / 6.0) && near(g.dk[4], 93 / 6.0));

  const double causal_delta[2] = {-2, 8.5};
  options.causal = 1;
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, NULL) == ANYFLASH_OK);
  check_gradients(&g, kCausal, causal_delta, 0);
  CHECK(g.dk[4] == 0 && g.dv[4] == 0); /* row 0 does not see key 2 */

  /* Default options: scale 1 / sqrt(2), so that row 0 has the weights 1, 2^c and 3^c. */
  make_gradients(&g, NULL);
  CHECK(run_backward(&g, NULL, NULL) == ANYFLASH_OK);
  const double c = sqrt(0.5), sum = 1 + pow(2, c) + pow(3, c);
  CHECK(near(g.dv[0], 1 / sum) && near(g.dv[2], pow(2, c) / sum));
  CHECK(near(g.dk[0], c / sum * (6 - g.p.out[0])));
}

static void check_options(void) {
  Gradients g;
  anyflash_forward_options options = scale_one();
  anyflash_backward_options backward = ANYFLASH_BACKWARD_OPTIONS_INIT;
  const double delta[2] = {29, 8.5};
  int64_t lse_shape[3] = {1, 1, 2}, keys[4] = {1, 1, 1, 3}, one[1] = {1};
  float two[2] = {2, 2}, zeros[3] = {0, 0, 0}, dbias[3] = {-77, -77, -77};
  float number = logf(6), result = -77;
  const DLTensor dlse = tensor(two, 3, lse_shape), bias = tensor(zeros, 4, keys);
  const DLTensor dbiases = tensor(dbias, 4, keys);
  const DLTensor single = tensor(&number, 1, one), dsingle = tensor(&result, 1, one);

  backward.deterministic = 1;
  backward.dlse = &dlse; /* twice P is added to dS */
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 2);
  backward.dlse = NULL;

  options.bias = &bias;
  backward.dbias = &dbiases;
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 0);
  CHECK(near(dbias[0], (-23 + 14) / 6.0)); /* dS summed over the rows */
  CHECK(near(dbias[1], (-70 - 5.5) / 6.0) && near(dbias[2], (93 - 8.5) / 6.0));
  options.bias = NULL;
  make_gradients(&g, &options);
  expect_backward(&g, &options, &backward, ANYFLASH_INVALID_VALUE, "dbias is given without bias");
  backward.dbias = NULL;

  options.sinks = &single; /* as much as all keys: halves of all probabilities */
  backward.dsinks = &dsingle;
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  CHECK(near(result, -0.5 * (14.5 + 4.25)));
  options.sinks = NULL;
  backward.dsinks = NULL;

  make_gradients(&g, &options);
  memset(g.dq, 0, sizeof g.dq);
  backward.accumulate_dq = 1;
  for (int i = 0; i < 2; ++i) CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  for (int i = 0; i < 4; ++i) g.dq[i] /= 2;
  check_gradients(&g, kFull, delta, 0);
  backward.accumulate_dq = 0;
  const DLTensor wrong = typed(two, 3, lse_shape, kDLComplex, 64);
  backward.dlse = &wrong;
  make_gradients(&g, &options);
  expect_backward(&g, &options, &backward, ANYFLASH_INVALID_TYPE, ": dlse is complex64; it must");
  backward.dlse = NULL;

  number = 0; /* distances: 1 0 1 and 2 1 0 */
  options.alibi_slopes = &single;
  backward.dalibi_slopes = &dsingle;
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  CHECK(near(result, -(-23 + 93 + 2 * 14 - 5.5) / 6.0));
}

/* The forward's outputs among the options are ignored, whatever they are. */
static void check_ignored(void) {
  Gradients g;
  anyflash_forward_options options = scale_one();
  int64_t one[1] = {1};
  double number = -77;
  const DLTensor wrong = typed(&number, 1, one, kDLComplex, 64);
  const double delta[2] = {29, 8.5};
  make_gradients(&g, &options);
  options.dropout_mask = options.max_logits = &wrong;
  CHECK(run_backward(&g, &options, NULL) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 0);
  CHECK(number == -77);
}

static void check_errors(void) {
  Gradients g;
  size_t bytes = 7;
  make_gradients(&g, NULL);
  Problem* const p = &g.p;
  const DLTensor* const arguments[9] = {&g.tensor_dout, &p->tensor_q,   &p->tensor_k,
                                        &p->tensor_v,   &p->tensor_out, &p->tensor_lse,
                                        &g.tensor_dq,   &g.tensor_dk,   &g.tensor_dv};
  const char* const names[9] = {"dout is NULL", "q is NULL",   "k is NULL",
                                "v is NULL",    "out is NULL", "lse is NULL",
                                "dq is NULL",   "dk is NULL",  "dv is NULL"};
  for (int missing = 0; missing < 9; ++missing) {
    const DLTensor* t[9];
    memcpy(t, arguments, sizeof t);
    t[missing] = NULL;
    CHECK(anyflash_backward_workspace_size(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
                                           NULL, NULL, &bytes) == ANYFLASH_INVALID_VALUE);
    CHECK(strstr(anyflash_last_error(), names[missing]) != NULL);
    CHECK(anyflash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], NULL, NULL, NULL,
                            0) == ANYFLASH_INVALID_VALUE);
    CHECK(strstr(anyflash_last_error(), names[missing]) != NULL);
  }
  CHECK(bytes == 7);
  const DLTensor* const* const t = arguments;
  CHECK(anyflash_backward_workspace_size(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], NULL,
                                         NULL, NULL) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "bytes is NULL") != NULL);
  CHECK(anyflash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], NULL, NULL, NULL,
                          0) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "workspace has 0 bytes") != NULL);
  CHECK(no_gradients(&g));

  g.tensor_dk.dtype.code = kDLInt;
  expect_backward(&g, NULL, NULL, ANYFLASH_INVALID_TYPE, "dk is int32; float64, float32");
  make_gradients(&g, NULL);
  g.p.tensor_lse.dtype.bits = 16;
  expect_backward(&g, NULL, NULL, ANYFLASH_INVALID_TYPE, "lse is float16; it must be float32");
}

typedef struct {
  anyflash_backward_options known;
  uint64_t unknown;
} NewerOptions;

static void check_option_sizes(void) {
  Gradients g;
  const anyflash_forward_options options = scale_one();
  anyflash_backward_options backward = ANYFLASH_BACKWARD_OPTIONS_INIT;
  const double delta[2] = {29, 8.5};
  DLTensor wrong;
  memset(&wrong, 0xab, sizeof wrong);

  backward.size = offsetof(anyflash_backward_options, dlse); /* an older caller */
  backward.dlse = &wrong;
  make_gradients(&g, &options);
  CHECK(run_backward(&g, &options, &backward) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 0);
  backward.size = 0;
  make_gradients(&g, &options);
  expect_backward(&g, &options, &backward, ANYFLASH_INVALID_VALUE,
                  "options.size is 0; it must be sizeof(anyflash_backward_options)");

  NewerOptions newer = {ANYFLASH_BACKWARD_OPTIONS_INIT, 0};
  newer.known.size = sizeof newer;
  CHECK(run_backward(&g, &options, &newer.known) == ANYFLASH_OK);
  check_gradients(&g, kFull, delta, 0);
  make_gradients(&g, &options);
  newer.unknown = 1;
  expect_backward(&g, &options, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
  newer.unknown = 0;
  newer.known.reserved = 1;
  expect_backward(&g, &options, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
}

int main(void) {
  check_hand_computed();
  check_options();
  check_ignored();
  check_errors();
  check_option_sizes();
  if (failures == 0) puts("all checks passed");
  return failures != 0;
}
