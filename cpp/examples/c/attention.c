/* Attention and its gradients from C99, in float64 on the CPU, checked against the formula and
 * against differences of the loss. Two sequences are packed into one tensor; four query heads share
 * two heads of keys and values.
 *
 *   cc -std=c99 attention.c $(pkg-config --cflags --libs anyflash) -lm -o attention
 */
#include <anyflash/anyflash.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 2, TOTAL = 7, HEADS = 4, HEADS_K = 2, DIM = 8 };

static const int32_t starts[BATCH + 1] = {0, 3, TOTAL};

typedef struct {
  double q[TOTAL][HEADS][DIM], k[TOTAL][HEADS_K][DIM], v[TOTAL][HEADS_K][DIM];
} Inputs;

typedef struct {
  double out[TOTAL][HEADS][DIM];
  float lse[HEADS][TOTAL];
} Results;

static void stop(const char* what) {
  fprintf(stderr, "%s: %s\n", what, anyflash_last_error());
  exit(1);
}

/* A contiguous tensor on the CPU; the library reads `shape` and `data` during the call. */
static DLTensor tensor(void* data, int ndim, int64_t* shape, uint8_t code, uint8_t bits) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static DLTensor numbers(void* data, int64_t* shape) { return tensor(data, 3, shape, kDLFloat, 64); }

/* The library says how much workspace it needs; we own it. */
static void* workspace_of(size_t bytes) {
  void* const memory = malloc(bytes);
  if (memory == NULL && bytes > 0) stop("out of memory");
  return memory;
}

static anyflash_forward_options packed(const DLTensor* cu_seqlens) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  options.causal = 1;
  options.cu_seqlens_q = options.cu_seqlens_k = cu_seqlens;
  options.max_seqlen_q = options.max_seqlen_k = TOTAL;
  return options;
}

static int64_t shape_q[3] = {TOTAL, HEADS, DIM}, shape_k[3] = {TOTAL, HEADS_K, DIM};
static int64_t shape_lse[2] = {HEADS, TOTAL}, shape_starts[1] = {BATCH + 1};

static void attend(Inputs* in, Results* result) {
  const DLTensor q = numbers(in->q, shape_q), k = numbers(in->k, shape_k);
  const DLTensor v = numbers(in->v, shape_k), out = numbers(result->out, shape_q);
  const DLTensor lse = tensor(result->lse, 2, shape_lse, kDLFloat, 32);
  const DLTensor cu_seqlens = tensor((void*)starts, 1, shape_starts, kDLInt, 32);
  const anyflash_forward_options options = packed(&cu_seqlens);
  size_t bytes = 0;
  if (anyflash_forward_workspace_size(&q, &k, &v, &out, &lse, &options, &bytes) != ANYFLASH_OK) {
    stop("workspace");
  }
  void* const workspace = workspace_of(bytes);
  if (anyflash_forward(&q, &k, &v, &out, &lse, &options, workspace, bytes) != ANYFLASH_OK) {
    stop("forward");
  }
  free(workspace);
}

/* Gradients of the loss sum(weights * out). */
static void differentiate(Inputs* in, Results* result, double (*weights)[HEADS][DIM],
                          Inputs* gradients) {
  const DLTensor q = numbers(in->q, shape_q), k = numbers(in->k, shape_k);
  const DLTensor v = numbers(in->v, shape_k), out = numbers(result->out, shape_q);
  const DLTensor lse = tensor(result->lse, 2, shape_lse, kDLFloat, 32);
  const DLTensor dout = numbers(weights, shape_q), dq = numbers(gradients->q, shape_q);
  const DLTensor dk = numbers(gradients->k, shape_k), dv = numbers(gradients->v, shape_k);
  const DLTensor cu_seqlens = tensor((void*)starts, 1, shape_starts, kDLInt, 32);
  const anyflash_forward_options options = packed(&cu_seqlens);
  size_t bytes = 0;
  if (anyflash_backward_workspace_size(&dout, &q, &k, &v, &out, &lse, &dq, &dk, &dv, &options, NULL,
                                       &bytes) != ANYFLASH_OK) {
    stop("workspace of the backward");
  }
  void* const workspace = workspace_of(bytes);
  if (anyflash_backward(&dout, &q, &k, &v, &out, &lse, &dq, &dk, &dv, &options, NULL, workspace,
                        bytes) != ANYFLASH_OK) {
    stop("backward");
  }
  free(workspace);
}

/* The largest difference from softmax(q k^T / sqrt(DIM)) v, as the formula says. */
static double difference(const Inputs* in, const Results* result) {
  double largest = 0;
  for (int b = 0; b < BATCH; ++b) {
    for (int i = starts[b]; i < starts[b + 1]; ++i) {
      for (int h = 0; h < HEADS; ++h) {
        const int g = h / (HEADS / HEADS_K);
        double expected[DIM] = {0}, sum = 0;
        for (int j = starts[b]; j <= i; ++j) {
          double score = 0;
          for (int d = 0; d < DIM; ++d) score += in->q[i][h][d] * in->k[j][g][d];
          const double weight = exp(score / sqrt(DIM));
          sum += weight;
          for (int d = 0; d < DIM; ++d) expected[d] += weight * in->v[j][g][d];
        }
        for (int d = 0; d < DIM; ++d) {
          largest = fmax(largest, fabs(result->out[i][h][d] - expected[d] / sum));
        }
        largest = fmax(largest, 1e-8 * fabs(result->lse[h][i] - log(sum))); /* a float */
      }
    }
  }
  return largest;
}

static double loss(Inputs* in, double (*weights)[HEADS][DIM]) {
  Results result;
  double sum = 0;
  attend(in, &result);
  for (int i = 0; i < TOTAL; ++i) {
    for (int h = 0; h < HEADS; ++h) {
      for (int d = 0; d < DIM; ++d) sum += weights[i][h][d] * result.out[i][h][d];
    }
  }
  return sum;
}

int main(void) {
  static Inputs in, gradients;
  static Results result;
  static double weights[TOTAL][HEADS][DIM];
  double* const inputs = (double*)&in;
  const double* const found = (double*)&gradients;
  const int count = sizeof in / sizeof(double);
  for (int i = 0; i < count; ++i) inputs[i] = sin(3.0 * i + 1);
  for (int i = 0; i < TOTAL * HEADS * DIM; ++i) (&weights[0][0][0])[i] = cos(2.0 * i);

  attend(&in, &result);
  const double forward_error = difference(&in, &result);

  differentiate(&in, &result, weights, &gradients);
  double backward_error = 0;
  for (int i = 0; i < count; i += 7) {
    const double step = 1e-5, before = inputs[i];
    inputs[i] = before + step;
    const double above = loss(&in, weights);
    inputs[i] = before - step;
    const double below = loss(&in, weights);
    inputs[i] = before;
    backward_error = fmax(backward_error, fabs(found[i] - (above - below) / (2 * step)));
  }
  printf("anyflash %s: difference of the output %.1e, of the gradients %.1e\n", anyflash_version(),
         forward_error, backward_error);

  /* What is wrong is refused: a status, a message, and nothing is written. */
  DLTensor q = numbers(in.q, shape_q), k = numbers(in.k, shape_k);
  q.ndim = 2;
  const anyflash_status status = anyflash_forward(&q, &k, &k, &q, NULL, NULL, NULL, 0);
  printf("status %d: %s\n", (int)status, anyflash_last_error());
  return !(forward_error < 1e-13 && backward_error < 1e-6 && status == ANYFLASH_INVALID_VALUE);
}
