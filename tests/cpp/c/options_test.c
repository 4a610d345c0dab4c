/* A C11 program: every field of the options, packed sequences and merge_states, with results
 * computed by hand. */
#include "problem.h"

static anyflash_forward_options scale_one(void) {
  anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  options.has_softmax_scale = 1;
  options.softmax_scale = 1.0;
  return options;
}

/* Numbers: the windows' fields count only where they are set. */
static void check_windows(void) {
  Problem p;
  anyflash_forward_options options = scale_one();
  options.window_left = 0; /* not set */
  options.window_right = -7;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 29) && near(p.lse[0], log(6)));
  options.has_window_left = 1;
  CHECK(run(&p, &options) == ANYFLASH_OK); /* query 0: keys 1 and 2, 2/5 and 3/5 */
  CHECK(near(p.out[0], 33.6) && near(p.lse[0], log(5)));
  options.has_window_right = 1;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "window_right is -7");
  options.window_right = 0;
  CHECK(run(&p, &options) == ANYFLASH_OK); /* one key each */
  CHECK(near(p.out[0], -6) && near(p.out[1], 3) && near(p.out[2], 60) && near(p.lse[0], log(2)));

  options = scale_one();
  options.softcap = 2;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.lse[1], log(exp(2 * tanh(log(2))) + 2))); /* scores ln 4, 0, 0 */
}

/* Positions in a larger attention: two rows and three keys of it. */
static void check_part(void) {
  Problem p;
  anyflash_forward_options options = scale_one();
  options.causal = 1;
  options.query_start = 1; /* not set: query 0 sees keys 0 and 1, 1/3 and 2/3 */
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], -2) && near(p.lse[0], log(3)));
  options.has_query_start = 1;
  options.query_start = 0; /* then key 0 alone */
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 6) && near(p.lse[0], 0));
  options.has_diagonal = 1;
  options.diagonal = 2;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 29) && near(p.lse[0], log(6)));
  options.has_key_start = 1;
  options.key_start = 3; /* beyond what query 0 sees */
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(p.out[0] == 0 && p.lse[0] == -INFINITY);

  int64_t one[1] = {1};
  int32_t start = 2;
  const DLTensor starts = typed(&start, 1, one, kDLInt, 32);
  options.has_key_start = options.has_query_start = 0;
  options.diagonal = 0;
  options.query_starts = &starts;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 29));
  options.reserved2 = 1;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_UNSUPPORTED, "does not know");
}

/* Every input tensor of the options, one after the other. */
static void check_option_tensors(void) {
  Problem p;
  anyflash_forward_options options = scale_one();
  int64_t one[1] = {1}, two[1] = {2}, four_ones[4] = {1, 1, 1, 1}, keys[4] = {1, 1, 1, 3};
  float number = 0;
  const DLTensor single = typed(&number, 1, one, kDLFloat, 32);

  number = logf(6);
  options.sinks = &single;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 14.5) && near(p.lse[0], log(12)));
  options.sinks = NULL;

  number = logf(2); /* distances of query 0 from the keys: 1, 0, 1 */
  options.alibi_slopes = &single;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], (6 * 0.5 - 6 * 2 + 60 * 1.5) / 4) && near(p.lse[0], log(4)));
  options.alibi_slopes = NULL;

  uint8_t keep[3] = {1, 0, 255};
  const DLTensor bias = typed(keep, 4, keys, kDLUInt, 8);
  options.bias = &bias;
  CHECK(run(&p, &options) == ANYFLASH_OK); /* keys 0 and 2: 1/4 and 3/4 */
  CHECK(near(p.out[0], 46.5) && near(p.lse[0], log(4)));
  options.bias = NULL;

  uint8_t block = 0;
  const DLTensor blocks = typed(&block, 4, four_ones, kDLBool, 8);
  options.block_mask = &blocks;
  options.block_size[0] = 64;
  options.block_size[1] = 128;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(p.out[0] == 0 && p.out[3] == 0 && p.lse[0] == -INFINITY);
  options.block_size[0] = options.block_size[1] = 0; /* 128 */
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(p.out[0] == 0 && p.lse[0] == -INFINITY);
  options.block_size[1] = 32;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "block_size[1] is 32");
  options.block_mask = NULL; /* then the size is not read */
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], 29));

  /* Query 0 sees keys 1 and 2, query 1 key 2 alone, in the second interval. */
  int64_t of_keys[4] = {1, 1, 3, 4}, of_one[4] = {1, 1, 3, 2};
  int32_t rows[12] = {5, 1, 2, 2, 0, 1, 9, -9, INT32_MIN, 1, 1, INT32_MAX};
  DLTensor ranges = typed(rows, 4, of_keys, kDLInt, 32);
  options.key_ranges = &ranges;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.lse[0], log(5)) && near(p.lse[1], 0));
  ranges = typed(rows, 4, of_one, kDLInt, 32); /* [5, 1), [2, 2) and [0, 1) */
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.lse[0], log(3)) && p.lse[1] == -INFINITY && p.out[3] == 0);
  ranges.dtype.bits = 64;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_TYPE, "key_ranges is int64; it must be int32");
  options.key_ranges = NULL;

  int32_t used = 2;
  const DLTensor lengths = typed(&used, 1, one, kDLInt, 32);
  options.seqused_k = &lengths;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], -2) && near(p.lse[0], log(3)));
  used = 4;
  make_problem(&p);
  expect(&p, &options, ANYFLASH_INVALID_VALUE, "seqused_k[0] is 4");
  const DLTensor wrong = typed(&used, 1, two, kDLInt, 16);
  options.seqused_k = &wrong;
  expect(&p, &options, ANYFLASH_INVALID_TYPE, "seqused_k is int16; it must be int32");
  options.seqused_k = NULL;
  options.sinks = &lengths;
  expect(&p, &options, ANYFLASH_INVALID_TYPE, "sinks is int32; float64, float32");
}

/* A tensor of a type that no option has: the error begins with its name. */
static void check_names(void) {
  Problem p;
  int64_t shape[4] = {1, 1, 1, 1};
  double number[2] = {0, 0};
  const DLTensor wrong = typed(number, 4, shape, kDLComplex, 128);
  anyflash_forward_options options = scale_one();
  const DLTensor** const fields[] = {
      &options.alibi_slopes, &options.bias,         &options.block_mask,   &options.sinks,
      &options.rng_state,    &options.dropout_mask, &options.max_logits,   &options.cu_seqlens_q,
      &options.cu_seqlens_k, &options.seqused_k,    &options.query_starts, &options.key_starts,
      &options.diagonals,    &options.prior_out,    &options.prior_lse,    &options.key_ranges};
  const char* const names[] = {"alibi_slopes", "bias",         "block_mask",   "sinks",
                               "rng_state",    "dropout_mask", "max_logits",   "cu_seqlens_q",
                               "cu_seqlens_k", "seqused_k",    "query_starts", "key_starts",
                               "diagonals",    "prior_out",    "prior_lse",    "key_ranges"};
  make_problem(&p);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; ++i) {
    char words[64];
    *fields[i] = &wrong;
    snprintf(words, sizeof words, "anyflash_forward_workspace_size: %s is complex128; ", names[i]);
    expect(&p, &options, ANYFLASH_INVALID_TYPE, words);
    *fields[i] = NULL;
  }
}

/* Keys that begin elsewhere: query 1 sees the first of them alone. */
static void check_key_starts(void) {
  Problem p;
  int64_t one[1] = {1};
  int32_t start = 1;
  const DLTensor starts = typed(&start, 1, one, kDLInt, 32);
  anyflash_forward_options options = scale_one();
  options.causal = 1;
  options.has_diagonal = 1; /* query i sees keys up to i */
  options.key_starts = &starts;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(p.out[0] == 0 && p.lse[0] == -INFINITY);
  CHECK(near(p.out[2], 6) && near(p.out[3], 12) && near(p.lse[1], log(4)));
}

/* Dropout and what it returns; seed and offset from the options or from memory. */
static void check_outputs(void) {
  Problem p;
  anyflash_forward_options options = scale_one();
  int64_t mask_shape[4] = {1, 1, 2, 3}, pairs[2] = {1, 1}, two[1] = {2};
  uint8_t mask[6], again[6];
  float largest = -77;
  uint64_t state[2] = {123, 456};
  const DLTensor masks = typed(mask, 4, mask_shape, kDLBool, 8);
  const DLTensor others = typed(again, 4, mask_shape, kDLUInt, 8);
  const DLTensor maxima = typed(&largest, 2, pairs, kDLFloat, 32);
  const DLTensor states = typed(state, 1, two, kDLUInt, 64);
  memset(mask, 7, sizeof mask);
  options.dropout_p = 0.5;
  options.seed = 123;
  options.offset = 456;
  options.dropout_mask = &masks;
  options.max_logits = &maxima;
  make_problem(&p);
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(largest, log(4)) && near(p.lse[0], log(6)));
  const float v[3] = {6, -6, 60};
  double expected = 0;
  for (int j = 0; j < 3; ++j) {
    CHECK(mask[j] <= 1);
    expected += mask[j] * 2 * v[j] * (j + 1) / 6.0;
  }
  CHECK(near(p.out[0], expected));

  options.seed = 1;
  options.rng_state = &states;
  options.dropout_mask = &others;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(memcmp(mask, again, sizeof mask) == 0 && near(p.out[0], expected));
}

/* Queries {0}, {}, {1} and keys {0, 1}, {}, {2}. */
static void check_packed(void) {
  Problem p;
  anyflash_forward_options options = scale_one();
  int32_t starts_q[4] = {0, 1, 1, 2}, starts_k[4] = {0, 2, 2, 3};
  int64_t four[1] = {4};
  const DLTensor cu_q = typed(starts_q, 1, four, kDLInt, 32);
  const DLTensor cu_k = typed(starts_k, 1, four, kDLInt, 32);
  make_problem(&p);
  options.cu_seqlens_q = &cu_q;
  options.cu_seqlens_k = &cu_k;
  options.max_seqlen_q = 1;
  options.max_seqlen_k = 2;
  options.validate = 1;
  DLTensor* const tensors[] = {&p.tensor_q, &p.tensor_k, &p.tensor_v, &p.tensor_out, &p.tensor_lse};
  for (int i = 0; i < 5; ++i) { /* without the batch, which is 1 */
    --tensors[i]->ndim;
    ++tensors[i]->shape;
  }
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], -2) && near(p.out[1], 6) && near(p.lse[0], log(3)));
  CHECK(near(p.out[2], 60) && near(p.out[3], 0) && near(p.lse[1], 0));
  options.max_seqlen_q = options.max_seqlen_k = 0; /* as many as there are rows */
  p.out[0] = p.lse[1] = -77;
  CHECK(run(&p, &options) == ANYFLASH_OK);
  CHECK(near(p.out[0], -2) && near(p.lse[1], 0));
  options.max_seqlen_k = 1;
  CHECK(run(&p, &options) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "max_seqlen_k is 1") != NULL);
  options.cu_seqlens_k = NULL;
  CHECK(run(&p, &options) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "without cu_seqlens_k; both") != NULL);
}

/* Weights 1/4 and 3/4. */
static void check_merge(void) {
  float a[2] = {4, 8}, b[2] = {8, -4}, out[2] = {-77, -77};
  float lse_a = 0, lse_b = logf(3), lse = -77;
  int64_t shape[4] = {1, 1, 1, 2};
  const DLTensor out_a = tensor(a, 4, shape), out_b = tensor(b, 4, shape);
  const DLTensor result = tensor(out, 4, shape);
  const DLTensor lses_a = tensor(&lse_a, 3, shape), lses_b = tensor(&lse_b, 3, shape);
  const DLTensor lses = tensor(&lse, 3, shape);
  anyflash_merge_options options = ANYFLASH_MERGE_OPTIONS_INIT;
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &lses_b, &result, &lses, NULL) ==
        ANYFLASH_OK);
  CHECK(near(out[0], 7) && near(out[1], -1) && near(lse, log(4)));
  lse_b = -INFINITY;
  options.num_threads = 2;
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &lses_b, &result, NULL, &options) ==
        ANYFLASH_OK);
  CHECK(out[0] == 4 && out[1] == 8);

  options.num_threads = -1;
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &lses_b, &result, NULL, &options) ==
        ANYFLASH_INVALID_VALUE);
  CHECK(strcmp(anyflash_last_error(),
               "anyflash_merge_states: num_threads is -1; 0 (the default) or a positive number is "
               "allowed") == 0);
  options.size = offsetof(anyflash_merge_options, num_threads); /* an older caller */
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &lses_b, &result, NULL, &options) ==
        ANYFLASH_OK);
  options.size = 0;
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &lses_b, &result, NULL, &options) ==
        ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "sizeof(anyflash_merge_options)") != NULL);
  CHECK(anyflash_merge_states(&out_a, NULL, &out_b, &lses_b, &result, NULL, NULL) ==
        ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "lse_a is NULL") != NULL);
  const DLTensor wrong = typed(&lse_b, 3, shape, kDLComplex, 32);
  CHECK(anyflash_merge_states(&out_a, &lses_a, &out_b, &wrong, &result, NULL, NULL) ==
        ANYFLASH_INVALID_TYPE);
  CHECK(strstr(anyflash_last_error(),
               "anyflash_merge_states: lse_b is complex32; it must be "
               "float32 or, on the CPU, float64"));
}

int main(void) {
  check_windows();
  check_part();
  check_option_tensors();
  check_names();
  check_key_starts();
  check_outputs();
  check_packed();
  check_merge();
  if (failures == 0) puts("all checks passed");
  return failures != 0;
}
