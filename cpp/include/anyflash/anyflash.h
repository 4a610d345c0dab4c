/* C ABI of anyflash. Tensors are DLPack's DLTensor, options a struct that begins with its size.
 *
 *   float x[6] = {1, 2, 0, -1, 3, 1}, y[6];
 *   int64_t shape[4] = {1, 3, 1, 2}; // batch, seqlen, heads, head_dim
 *   DLTensor q = {.data = x, .device = {kDLCPU, 0}, .ndim = 4, .shape = shape};
 *   q.dtype = (DLDataType){.code = kDLFloat, .bits = 32, .lanes = 1};
 *   DLTensor out = q;
 *   out.data = y;
 *   anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
 *   options.causal = 1;
 *   size_t bytes = 0;
 *   anyflash_forward_workspace_size(&q, &q, &q, &out, NULL, &options, &bytes);
 *   void* workspace = malloc(bytes);
 *   if (anyflash_forward(&q, &q, &q, &out, NULL, &options, workspace, bytes) != ANYFLASH_OK) {
 *     puts(anyflash_last_error());
 *   }
 *   free(workspace);
 *
 * Every function returns a status; on failure anyflash_last_error() says what was given and what is
 * allowed, and nothing has been written. What the functions compute, shapes and types: attention.h.
 */
#ifndef ANYFLASH_ANYFLASH_H_
#define ANYFLASH_ANYFLASH_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#include "anyflash/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  ANYFLASH_OK = 0,
  ANYFLASH_INVALID_VALUE = 1,
  ANYFLASH_INVALID_TYPE = 2,
  ANYFLASH_UNSUPPORTED = 3,
  ANYFLASH_DEVICE_ERROR = 4,
  ANYFLASH_INTERNAL_ERROR = 5
} anyflash_status;

typedef enum {
  ANYFLASH_CPU_AUTO = 0,
  ANYFLASH_CPU_BASELINE = 1,
  ANYFLASH_CPU_AVX2 = 2,
  ANYFLASH_CPU_AVX512 = 3,
  ANYFLASH_CPU_NEON = 4,
  ANYFLASH_CPU_AMX = 5
} anyflash_cpu_isa;

/* What the fields mean, shapes and types: options.h. New fields are only ever added at the end;
 * `size` tells the library which ones the caller knows. Zero is every field's default. Initialise
 * with ANYFLASH_FORWARD_OPTIONS_INIT. */
typedef struct {
  size_t size;          /* sizeof(anyflash_forward_options) */
  double softmax_scale; /* read if has_softmax_scale, else 1 / sqrt(head_dim) */
  int32_t has_softmax_scale;
  int32_t causal;
  int32_t num_threads; /* CPU; 0: OpenMP's default */
  int32_t cpu_isa;     /* anyflash_cpu_isa */
  void* stream;        /* cudaStream_t; NULL: the legacy default stream */

  int32_t has_window_left; /* else unbounded */
  int32_t has_window_right;
  int64_t window_left;
  int64_t window_right;
  double softcap; /* 0: none */
  const DLTensor* alibi_slopes;
  const DLTensor* bias;
  const DLTensor* block_mask;
  int64_t block_size[2]; /* read if block_mask; 0: 128 */
  const DLTensor* sinks;

  double dropout_p;
  uint64_t seed;
  uint64_t offset;
  const DLTensor* rng_state;
  const DLTensor* dropout_mask; /* output */
  const DLTensor* max_logits;   /* output */

  const DLTensor* cu_seqlens_q; /* packed sequences */
  const DLTensor* cu_seqlens_k;
  int64_t max_seqlen_q; /* these two, 0: as many as there are rows */
  int64_t max_seqlen_k;
  const DLTensor* seqused_k;
  int32_t validate;
  int32_t reserved; /* 0 */

  int32_t has_query_start; /* these six: else 0, and the bottom right if none is given */
  int32_t has_key_start;
  int32_t has_diagonal;
  int32_t reserved2; /* 0 */
  int64_t query_start;
  int64_t key_start;
  int64_t diagonal;
  const DLTensor* query_starts;
  const DLTensor* key_starts;
  const DLTensor* diagonals;
  int64_t batch_start;
  int64_t head_start;
  int64_t total_heads; /* 0: q's */
  const DLTensor* prior_out;
  const DLTensor* prior_lse;
  const DLTensor* key_ranges;
} anyflash_forward_options;

/* clang-format off */
#define ANYFLASH_FORWARD_OPTIONS_INIT                                                      \
  {sizeof(anyflash_forward_options), 0.0, 0, 0, 0, 0, NULL,                                \
   0, 0, 0, 0, 0.0, NULL, NULL, NULL, {0, 0}, NULL,                                        \
   0.0, 0, 0, NULL, NULL, NULL,                                                            \
   NULL, NULL, 0, 0, NULL, 0, 0,                                                           \
   0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, 0, 0, 0, NULL, NULL, NULL}
/* clang-format on */

/* `lse` may be NULL, `options` too (defaults). The workspace lies on the tensors'
 * device and may begin anywhere. */
ANYFLASH_API anyflash_status anyflash_forward_workspace_size(
    const DLTensor* q, const DLTensor* k, const DLTensor* v, const DLTensor* out,
    const DLTensor* lse, const anyflash_forward_options* options, size_t* bytes);

ANYFLASH_API anyflash_status anyflash_forward(const DLTensor* q, const DLTensor* k,
                                              const DLTensor* v, const DLTensor* out,
                                              const DLTensor* lse,
                                              const anyflash_forward_options* options,
                                              void* workspace, size_t workspace_bytes);

typedef struct {
  size_t size;           /* sizeof(anyflash_backward_options) */
  int32_t deterministic; /* bitwise the same gradients in every run */
  int32_t reserved;      /* 0 */
  const DLTensor* dlse;
  const DLTensor* dbias;         /* output */
  const DLTensor* dsinks;        /* output */
  const DLTensor* dalibi_slopes; /* output */
  int32_t accumulate_dq;
  int32_t accumulate_dkv;
  const DLTensor* dq_sums; /* of several calls over the same rows; input and output */
  int64_t dq_sums_first;
  int64_t dq_sums_rows;
  int32_t dq_sums_begin;
  int32_t dq_sums_end;
} anyflash_backward_options;

#define ANYFLASH_BACKWARD_OPTIONS_INIT \
  {sizeof(anyflash_backward_options), 0, 0, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, 0, 0, 0}

/* `options` are those that the forward was given; both options may be NULL (defaults). */
ANYFLASH_API anyflash_status anyflash_backward_workspace_size(
    const DLTensor* dout, const DLTensor* q, const DLTensor* k, const DLTensor* v,
    const DLTensor* out, const DLTensor* lse, const DLTensor* dq, const DLTensor* dk,
    const DLTensor* dv, const anyflash_forward_options* options,
    const anyflash_backward_options* backward_options, size_t* bytes);

ANYFLASH_API anyflash_status anyflash_backward(
    const DLTensor* dout, const DLTensor* q, const DLTensor* k, const DLTensor* v,
    const DLTensor* out, const DLTensor* lse, const DLTensor* dq, const DLTensor* dk,
    const DLTensor* dv, const anyflash_forward_options* options,
    const anyflash_backward_options* backward_options, void* workspace, size_t workspace_bytes);

/* Of dq_sums, for all rows of q. 0: the kernel keeps none. Reads no tensor. */
ANYFLASH_API anyflash_status anyflash_dq_sums_size(const DLTensor* q, int64_t head_dim_v,
                                                   const anyflash_forward_options* options,
                                                   size_t* bytes);

/* Meaning, shapes and types: KvCacheOptions in options.h. */
typedef struct {
  size_t size; /* sizeof(anyflash_kvcache_options) */
  const DLTensor* cache_seqlens;
  const DLTensor* cache_batch_idx;
  const DLTensor* cache_leftpad;
  const DLTensor* block_table;
  const DLTensor* k_new;
  const DLTensor* v_new;
  const DLTensor* rotary_cos;
  const DLTensor* rotary_sin;
  int32_t rotary_neox; /* pairs are halves apart; 0: neighbours (interleaved) */
  int32_t reserved;    /* 0 */
  const DLTensor* tree_mask;
  const DLTensor* k_scale;
  const DLTensor* v_scale;
  int64_t num_splits;
  int64_t split_size;
  const DLTensor* rotary_seqlens;
  int64_t head_dim_v; /* 0: v_cache's; else v_cache is NULL, and v the first columns of k_cache */
  const DLTensor* cu_seqlens_k_new; /* packed queries (anyflash_forward_options::cu_seqlens_q) */
} anyflash_kvcache_options;

/* clang-format off */
#define ANYFLASH_KVCACHE_OPTIONS_INIT                                                      \
  {sizeof(anyflash_kvcache_options), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, \
   NULL, NULL, NULL, 0, 0, NULL, 0, NULL}
/* clang-format on */

/* The cache is written where new keys are given. `lse` and both options may be NULL. */
ANYFLASH_API anyflash_status anyflash_forward_with_kvcache_workspace_size(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* out,
    const DLTensor* lse, const anyflash_forward_options* options,
    const anyflash_kvcache_options* cache_options, size_t* bytes);

ANYFLASH_API anyflash_status anyflash_forward_with_kvcache(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* out,
    const DLTensor* lse, const anyflash_forward_options* options,
    const anyflash_kvcache_options* cache_options, void* workspace, size_t workspace_bytes);

typedef struct {
  size_t size;         /* sizeof(anyflash_merge_options) */
  int32_t num_threads; /* CPU; 0: OpenMP's default */
  int32_t reserved;    /* 0 */
  void* stream;        /* cudaStream_t; NULL: the legacy default stream */
} anyflash_merge_options;

#define ANYFLASH_MERGE_OPTIONS_INIT {sizeof(anyflash_merge_options), 0, 0, NULL}

/* `lse` may be NULL, `options` too (defaults). */
ANYFLASH_API anyflash_status anyflash_merge_states(const DLTensor* out_a, const DLTensor* lse_a,
                                                   const DLTensor* out_b, const DLTensor* lse_b,
                                                   const DLTensor* out, const DLTensor* lse,
                                                   const anyflash_merge_options* options);

/* The message of this thread's last failure; an empty string before the first. */
ANYFLASH_API const char* anyflash_last_error(void);

/* "0.1.0" */
ANYFLASH_API const char* anyflash_version(void);

/* The kernels of this build, 0 <= index < anyflash_kernel_count(). Of another index, and where
 * there is no memory for their list: 0 or NULL. */
ANYFLASH_API size_t anyflash_kernel_count(void);
ANYFLASH_API const char* anyflash_kernel_name(size_t index);
/* How often this process has launched the kernel. */
ANYFLASH_API uint64_t anyflash_kernel_launches(size_t index);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ANYFLASH_ANYFLASH_H_ */
