/* A program that knows anyflash.h as it was in 0.1. Compiled against that header it must run with
 * every later library; compiled against a later header, `consumer layout` must print the same. */
#include <anyflash/anyflash.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FIELD(type, field) \
  printf(#type "." #field " %zu %zu\n", offsetof(type, field), sizeof(((type*)NULL)->field))
#define VALUE(name) printf(#name " %d\n", (int)(name))

static void print_layout(void) {
  FIELD(anyflash_forward_options, size);
  FIELD(anyflash_forward_options, softmax_scale);
  FIELD(anyflash_forward_options, has_softmax_scale);
  FIELD(anyflash_forward_options, causal);
  FIELD(anyflash_forward_options, num_threads);
  FIELD(anyflash_forward_options, cpu_isa);
  FIELD(anyflash_forward_options, stream);
  FIELD(anyflash_forward_options, has_window_left);
  FIELD(anyflash_forward_options, has_window_right);
  FIELD(anyflash_forward_options, window_left);
  FIELD(anyflash_forward_options, window_right);
  FIELD(anyflash_forward_options, softcap);
  FIELD(anyflash_forward_options, alibi_slopes);
  FIELD(anyflash_forward_options, bias);
  FIELD(anyflash_forward_options, block_mask);
  FIELD(anyflash_forward_options, block_size);
  FIELD(anyflash_forward_options, sinks);
  FIELD(anyflash_forward_options, dropout_p);
  FIELD(anyflash_forward_options, seed);
  FIELD(anyflash_forward_options, offset);
  FIELD(anyflash_forward_options, rng_state);
  FIELD(anyflash_forward_options, dropout_mask);
  FIELD(anyflash_forward_options, max_logits);
  FIELD(anyflash_forward_options, cu_seqlens_q);
  FIELD(anyflash_forward_options, cu_seqlens_k);
  FIELD(anyflash_forward_options, max_seqlen_q);
  FIELD(anyflash_forward_options, max_seqlen_k);
  FIELD(anyflash_forward_options, seqused_k);
  FIELD(anyflash_forward_options, validate);
  FIELD(anyflash_forward_options, reserved);
  FIELD(anyflash_backward_options, size);
  FIELD(anyflash_backward_options, deterministic);
  FIELD(anyflash_backward_options, reserved);
  FIELD(anyflash_backward_options, dlse);
  FIELD(anyflash_backward_options, dbias);
  FIELD(anyflash_backward_options, dsinks);
  FIELD(anyflash_backward_options, dalibi_slopes);
  FIELD(anyflash_kvcache_options, size);
  FIELD(anyflash_kvcache_options, cache_seqlens);
  FIELD(anyflash_kvcache_options, cache_batch_idx);
  FIELD(anyflash_kvcache_options, cache_leftpad);
  FIELD(anyflash_kvcache_options, block_table);
  FIELD(anyflash_kvcache_options, k_new);
  FIELD(anyflash_kvcache_options, v_new);
  FIELD(anyflash_kvcache_options, rotary_cos);
  FIELD(anyflash_kvcache_options, rotary_sin);
  FIELD(anyflash_kvcache_options, rotary_neox);
  FIELD(anyflash_kvcache_options, reserved);
  FIELD(anyflash_kvcache_options, tree_mask);
  FIELD(anyflash_kvcache_options, k_scale);
  FIELD(anyflash_kvcache_options, v_scale);
  FIELD(anyflash_kvcache_options, num_splits);
  FIELD(anyflash_kvcache_options, split_size);
  FIELD(anyflash_kvcache_options, rotary_seqlens);
  FIELD(anyflash_kvcache_options, head_dim_v);
  FIELD(anyflash_merge_options, size);
  FIELD(anyflash_merge_options, num_threads);
  FIELD(anyflash_merge_options, reserved);
  FIELD(anyflash_merge_options, stream);
  VALUE(ANYFLASH_OK);
  VALUE(ANYFLASH_INVALID_VALUE);
  VALUE(ANYFLASH_INVALID_TYPE);
  VALUE(ANYFLASH_UNSUPPORTED);
  VALUE(ANYFLASH_DEVICE_ERROR);
  VALUE(ANYFLASH_INTERNAL_ERROR);
  VALUE(ANYFLASH_CPU_AUTO);
  VALUE(ANYFLASH_CPU_BASELINE);
  VALUE(ANYFLASH_CPU_AVX2);
  VALUE(ANYFLASH_CPU_AVX512);
  VALUE(ANYFLASH_CPU_NEON);
}

static int failures = 0;

static void check(int condition, const char* what) {
  if (condition) return;
  printf("%s failed: %s\n", what, anyflash_last_error());
  ++failures;
}

static int near(float a, double b) { return fabs(a - b) < 2e-5; }

static DLTensor tensor(void* data, int ndim, int64_t* shape) {
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

/* One query, two keys with the scores ln 2 and 0, that is the weights 2/3 and 1/3. */
int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "layout") == 0) {
    print_layout();
    return 0;
  }
  float q[2] = {1, 0}, k[4] = {0.69314718F, 0, 0, 0}, v[4] = {3, 6, 9, 0}, out[2], lse[1];
  float dout[2] = {1, 0}, dq[2], dk[4], dv[4], sink = 0, dsink = 0;
  int64_t one[4] = {1, 1, 1, 2}, two[4] = {1, 2, 1, 2}, rows[3] = {1, 1, 1}, heads[1] = {1};
  const DLTensor tq = tensor(q, 4, one), tk = tensor(k, 4, two), tv = tensor(v, 4, two);
  const DLTensor to = tensor(out, 4, one), tl = tensor(lse, 3, rows), td = tensor(dout, 4, one);
  const DLTensor tdq = tensor(dq, 4, one), tdk = tensor(dk, 4, two), tdv = tensor(dv, 4, two);
  const DLTensor sinks = tensor(&sink, 1, heads), dsinks = tensor(&dsink, 1, heads);
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  anyflash_backward_options backward = ANYFLASH_BACKWARD_OPTIONS_INIT;
  anyflash_kvcache_options cache = ANYFLASH_KVCACHE_OPTIONS_INIT;
  anyflash_merge_options merge = ANYFLASH_MERGE_OPTIONS_INIT;
  const size_t room = 1 << 20;
  void* const workspace = aligned_alloc(256, room);
  size_t bytes = 0;
  options.has_softmax_scale = 1;
  options.softmax_scale = 1;
  check(strlen(anyflash_version()) >= 5 && anyflash_kernel_count() > 0 &&
            anyflash_kernel_name(0) != NULL && anyflash_kernel_launches(0) == 0,
        "facts");
  check(anyflash_forward_workspace_size(&tq, &tk, &tv, &to, &tl, &options, &bytes) == ANYFLASH_OK &&
            bytes <= room,
        "workspace of the forward");
  check(anyflash_forward(&tq, &tk, &tv, &to, &tl, &options, workspace, bytes) == ANYFLASH_OK &&
            near(out[0], 5) && near(out[1], 4) && near(lse[0], log(3)),
        "forward");

  /* dS = P (dP - delta) with dP = (3, 9) and delta = 5. */
  check(anyflash_backward_workspace_size(&td, &tq, &tk, &tv, &to, &tl, &tdq, &tdk, &tdv, &options,
                                         &backward, &bytes) == ANYFLASH_OK &&
            bytes <= room,
        "workspace of the backward");
  check(anyflash_backward(&td, &tq, &tk, &tv, &to, &tl, &tdq, &tdk, &tdv, &options, &backward,
                          workspace, bytes) == ANYFLASH_OK &&
            near(dv[0], 2 / 3.0) && near(dv[2], 1 / 3.0) && near(dk[0], -4 / 3.0) &&
            near(dq[0], -4 / 3.0 * log(2)),
        "backward");

  /* With a sink of 0 the weights are 2/4 and 1/4; the last fields of both structs are read. */
  options.sinks = &sinks;
  backward.dsinks = &dsinks;
  options.num_threads = 1;
  check(anyflash_forward(&tq, &tk, &tv, &to, &tl, &options, workspace, room) == ANYFLASH_OK &&
            near(out[0], 3.75) && near(lse[0], log(4)),
        "forward with a sink");
  check(anyflash_backward(&td, &tq, &tk, &tv, &to, &tl, &tdq, &tdk, &tdv, &options, &backward,
                          workspace, room) == ANYFLASH_OK &&
            near(dsink, -3.75 / 4),
        "backward with a sink");
  options.sinks = NULL;

  cache.num_splits = 2;
  check(anyflash_forward_with_kvcache_workspace_size(&tq, &tk, &tv, &to, &tl, &options, &cache,
                                                     &bytes) == ANYFLASH_OK &&
            bytes <= room,
        "workspace of the cache");
  check(anyflash_forward_with_kvcache(&tq, &tk, &tv, &to, &tl, &options, &cache, workspace,
                                      bytes) == ANYFLASH_OK &&
            near(out[0], 5) && near(lse[0], log(3)),
        "forward with a cache");

  merge.num_threads = 1;
  check(anyflash_merge_states(&to, &tl, &to, &tl, &to, &tl, &merge) == ANYFLASH_OK &&
            near(out[0], 5) && near(lse[0], log(6)),
        "merge");

  options.window_right = 5; /* not set: not read */
  options.reserved = 1;
  check(anyflash_forward(&tq, &tk, &tv, &to, &tl, &options, workspace, room) ==
                ANYFLASH_UNSUPPORTED &&
            strstr(anyflash_last_error(), "does not know") != NULL,
        "reserved field");
  free(workspace);
  if (failures == 0) printf("0.1 runs with %s\n", anyflash_version());
  return failures != 0;
}
