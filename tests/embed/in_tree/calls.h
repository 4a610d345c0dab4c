/* A valid call of each function of the C ABI, with arrays of exactly the size that they need. */
#ifndef ANYFLASH_TESTS_EMBED_CALLS_H_
#define ANYFLASH_TESTS_EMBED_CALLS_H_

#include <anyflash/anyflash.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARGUMENTS = 12, BATCH = 2, ROWS = 3, KEYS = 5, HEADS = 4, HEADS_K = 2, DIM = 8 };

typedef struct {
  const char* name;
  size_t bytes;
  DLTensor tensor;
  int64_t shape[4];
  void* data;
  void* before; /* a copy of the data */
  int output;
} Argument;

/* Options in an array of their size, which a test may replace. */
typedef struct {
  size_t size, reserved; /* the struct's, and the offset of its field `reserved` */
  void* data;
} Options;

typedef struct Call {
  const char* function;
  int count, required, options_count;
  Argument arguments[MAX_ARGUMENTS];
  const DLTensor* given[MAX_ARGUMENTS];
  Options options[2];
  void* workspace;
  size_t workspace_bytes;
  anyflash_status (*size)(struct Call*, size_t*);
  anyflash_status (*run)(struct Call*);
} Call;

static int failures = 0;

static void fail(const Call* call, const char* what, const char* why) {
  printf("%s, %s: %s (last error: %s)\n", call->function, what, why, anyflash_last_error());
  ++failures;
}

static void* copy_of(const void* data, size_t bytes) {
  void* const copy = malloc(bytes);
  if (copy == NULL) abort();
  memcpy(copy, data, bytes);
  return copy;
}

static Argument* add(Call* call, const char* name, int output, int code, int bits, int ndim,
                     const int64_t* shape) {
  Argument* const a = &call->arguments[call->count];
  size_t elements = 1;
  memset(a, 0, sizeof *a);
  a->name = name;
  a->output = output;
  for (int i = 0; i < ndim; ++i) elements *= (size_t)(a->shape[i] = shape[i]);
  a->bytes = elements * (size_t)bits / 8;
  a->tensor.data = a->data = calloc(elements, (size_t)bits / 8);
  a->tensor.device.device_type = kDLCPU;
  a->tensor.ndim = ndim;
  a->tensor.dtype.code = (uint8_t)code;
  a->tensor.dtype.bits = (uint8_t)bits;
  a->tensor.dtype.lanes = 1;
  a->tensor.shape = a->shape;
  for (size_t i = 0; code == kDLFloat && i < elements; ++i) {
    ((float*)a->data)[i] = sinf((float)(i + 7 * (size_t)call->count));
  }
  call->given[call->count++] = &a->tensor;
  return a;
}

static Argument* add_float(Call* call, const char* name, int output, int ndim, int64_t a, int64_t b,
                           int64_t c, int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  return add(call, name, output, kDLFloat, 32, ndim, shape);
}

static Argument* add_int(Call* call, const char* name, int64_t a, int64_t b, int32_t value) {
  const int64_t shape[2] = {a, b};
  Argument* const result = add(call, name, 0, kDLInt, 32, b > 0 ? 2 : 1, shape);
  for (int64_t i = 0; i < a * (b > 0 ? b : 1); ++i) ((int32_t*)result->data)[i] = value;
  return result;
}

static void add_options(Call* call, const void* options, size_t size, size_t reserved) {
  Options* const o = &call->options[call->options_count++];
  o->size = size;
  o->reserved = reserved;
  o->data = copy_of(options, size);
}

static anyflash_status size_forward(Call* c, size_t* bytes) {
  const DLTensor** const t = c->given;
  return anyflash_forward_workspace_size(t[0], t[1], t[2], t[3], t[4], c->options[0].data, bytes);
}

static anyflash_status run_forward(Call* c) {
  const DLTensor** const t = c->given;
  return anyflash_forward(t[0], t[1], t[2], t[3], t[4], c->options[0].data, c->workspace,
                          c->workspace_bytes);
}

static anyflash_status size_backward(Call* c, size_t* bytes) {
  const DLTensor** const t = c->given;
  return anyflash_backward_workspace_size(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
                                          c->options[0].data, c->options[1].data, bytes);
}

static anyflash_status run_backward(Call* c) {
  const DLTensor** const t = c->given;
  return anyflash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], c->options[0].data,
                           c->options[1].data, c->workspace, c->workspace_bytes);
}

static anyflash_status size_kvcache(Call* c, size_t* bytes) {
  const DLTensor** const t = c->given;
  return anyflash_forward_with_kvcache_workspace_size(
      t[0], t[1], t[2], t[3], t[4], c->options[0].data, c->options[1].data, bytes);
}

static anyflash_status run_kvcache(Call* c) {
  const DLTensor** const t = c->given;
  return anyflash_forward_with_kvcache(t[0], t[1], t[2], t[3], t[4], c->options[0].data,
                                       c->options[1].data, c->workspace, c->workspace_bytes);
}

static anyflash_status run_merge(Call* c) {
  const DLTensor** const t = c->given;
  return anyflash_merge_states(t[0], t[1], t[2], t[3], t[4], t[5], c->options[0].data);
}

static void begin(Call* c, const char* function, anyflash_status (*size)(Call*, size_t*),
                  anyflash_status (*run)(Call*)) {
  memset(c, 0, sizeof *c);
  c->function = function;
  c->size = size;
  c->run = run;
}

static void finish(Call* c) {
  if (c->size != NULL) {
    if (c->size(c, &c->workspace_bytes) != ANYFLASH_OK) fail(c, "valid call", "has no size");
    c->workspace = malloc(c->workspace_bytes);
    if (c->workspace == NULL) abort();
    memset(c->workspace, 0, c->workspace_bytes);
  }
  if (c->run(c) != ANYFLASH_OK) fail(c, "valid call", "is refused");
  for (int i = 0; i < c->count; ++i) {
    c->arguments[i].before = copy_of(c->arguments[i].data, c->arguments[i].bytes);
  }
}

static void end(Call* c) {
  for (int i = 0; i < c->count; ++i) {
    free(c->arguments[i].data);
    free(c->arguments[i].before);
  }
  for (int i = 0; i < c->options_count; ++i) free(c->options[i].data);
  free(c->workspace);
}

static void make_forward(Call* c, int packed) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  begin(c, packed ? "anyflash_forward (packed)" : "anyflash_forward", size_forward, run_forward);
  if (packed) {
    add_float(c, "q", 0, 3, ROWS, HEADS, DIM, 0);
    add_float(c, "k", 0, 3, KEYS, HEADS_K, DIM, 0);
    add_float(c, "v", 0, 3, KEYS, HEADS_K, DIM, 0);
    add_float(c, "out", 1, 3, ROWS, HEADS, DIM, 0);
    add_float(c, "lse", 1, 2, HEADS, ROWS, 0, 0);
    options.cu_seqlens_q = &add_int(c, "cu_seqlens_q", 2, 0, 0)->tensor;
    options.cu_seqlens_k = &add_int(c, "cu_seqlens_k", 2, 0, 0)->tensor;
    ((int32_t*)c->given[5]->data)[1] = options.max_seqlen_q = ROWS;
    ((int32_t*)c->given[6]->data)[1] = options.max_seqlen_k = KEYS;
  } else {
    add_float(c, "q", 0, 4, BATCH, ROWS, HEADS, DIM);
    add_float(c, "k", 0, 4, BATCH, KEYS, HEADS_K, DIM);
    add_float(c, "v", 0, 4, BATCH, KEYS, HEADS_K, DIM);
    add_float(c, "out", 1, 4, BATCH, ROWS, HEADS, DIM);
    add_float(c, "lse", 1, 3, BATCH, HEADS, ROWS, 0);
    options.bias = &add_float(c, "bias", 0, 4, BATCH, HEADS, ROWS, KEYS)->tensor;
    options.sinks = &add_float(c, "sinks", 0, 1, HEADS, 0, 0, 0)->tensor;
    options.alibi_slopes = &add_float(c, "alibi_slopes", 0, 2, BATCH, HEADS, 0, 0)->tensor;
    options.seqused_k = &add_int(c, "seqused_k", BATCH, 0, KEYS)->tensor;
    options.max_logits = &add_float(c, "max_logits", 1, 2, BATCH, HEADS, 0, 0)->tensor;
  }
  c->required = 4;
  add_options(c, &options, sizeof options, offsetof(anyflash_forward_options, reserved));
  finish(c);
}

static void make_backward(Call* c) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  anyflash_backward_options more = ANYFLASH_BACKWARD_OPTIONS_INIT;
  begin(c, "anyflash_backward", size_backward, run_backward);
  add_float(c, "dout", 0, 4, BATCH, ROWS, HEADS, DIM);
  add_float(c, "q", 0, 4, BATCH, ROWS, HEADS, DIM);
  add_float(c, "k", 0, 4, BATCH, KEYS, HEADS_K, DIM);
  add_float(c, "v", 0, 4, BATCH, KEYS, HEADS_K, DIM);
  add_float(c, "out", 0, 4, BATCH, ROWS, HEADS, DIM);
  add_float(c, "lse", 0, 3, BATCH, HEADS, ROWS, 0);
  add_float(c, "dq", 1, 4, BATCH, ROWS, HEADS, DIM);
  add_float(c, "dk", 1, 4, BATCH, KEYS, HEADS_K, DIM);
  add_float(c, "dv", 1, 4, BATCH, KEYS, HEADS_K, DIM);
  options.sinks = &add_float(c, "sinks", 0, 1, HEADS, 0, 0, 0)->tensor;
  more.dsinks = &add_float(c, "dsinks", 1, 1, HEADS, 0, 0, 0)->tensor;
  more.dlse = &add_float(c, "dlse", 0, 3, BATCH, HEADS, ROWS, 0)->tensor;
  c->required = 9;
  add_options(c, &options, sizeof options, offsetof(anyflash_forward_options, reserved));
  add_options(c, &more, sizeof more, offsetof(anyflash_backward_options, reserved));
  finish(c);
}

static void make_kvcache(Call* c) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  anyflash_kvcache_options more = ANYFLASH_KVCACHE_OPTIONS_INIT;
  begin(c, "anyflash_forward_with_kvcache", size_kvcache, run_kvcache);
  add_float(c, "q", 0, 4, BATCH, 1, HEADS, DIM);
  add_float(c, "k_cache", 1, 4, 3, 4, HEADS_K, DIM); /* three pages of four rows */
  add_float(c, "v_cache", 1, 4, 3, 4, HEADS_K, DIM);
  add_float(c, "out", 1, 4, BATCH, 1, HEADS, DIM);
  add_float(c, "lse", 1, 3, BATCH, HEADS, 1, 0);
  more.cache_seqlens = &add_int(c, "cache_seqlens", BATCH, 0, 3)->tensor;
  more.block_table = &add_int(c, "block_table", BATCH, 1, 2)->tensor;
  ((int32_t*)c->given[6]->data)[0] = 0;
  more.k_new = &add_float(c, "k_new", 0, 4, BATCH, 1, HEADS_K, DIM)->tensor;
  more.v_new = &add_float(c, "v_new", 0, 4, BATCH, 1, HEADS_K, DIM)->tensor;
  more.rotary_cos = &add_float(c, "rotary_cos", 0, 2, 8, DIM / 2, 0, 0)->tensor;
  more.rotary_sin = &add_float(c, "rotary_sin", 0, 2, 8, DIM / 2, 0, 0)->tensor;
  more.rotary_seqlens = &add_int(c, "rotary_seqlens", BATCH, 0, 5)->tensor;
  c->required = 4;
  add_options(c, &options, sizeof options, offsetof(anyflash_forward_options, reserved));
  add_options(c, &more, sizeof more, offsetof(anyflash_kvcache_options, reserved));
  finish(c);
}

static void make_merge(Call* c) {
  const anyflash_merge_options options = ANYFLASH_MERGE_OPTIONS_INIT;
  begin(c, "anyflash_merge_states", NULL, run_merge);
  for (int i = 0; i < 3; ++i) {
    add_float(c, i == 2 ? "out" : "part", i == 2, 4, BATCH, ROWS, HEADS, DIM);
    add_float(c, i == 2 ? "lse" : "lse of part", i == 2, 3, BATCH, HEADS, ROWS, 0);
  }
  c->required = 5;
  add_options(c, &options, sizeof options, offsetof(anyflash_merge_options, reserved));
  finish(c);
}

#endif /* ANYFLASH_TESTS_EMBED_CALLS_H_ */
