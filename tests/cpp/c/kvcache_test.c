/* A C11 program: anyflash_forward_with_kvcache with results computed by hand, its options and its
 * errors. */
#include "problem.h"

/* problem.h's keys as a cache of two pages of two rows, page 1 before page 0, or, with room for
 * one more row, of one sequence. Unused rows hold NaN. */
typedef struct {
  Problem p;
  float k[8], v[8], k_before[8], v_before[8];
  int32_t table[2], length[1];
  int64_t cache_shape[4], table_shape[2], one[1];
  DLTensor tensor_k, tensor_v, tensor_table, tensor_length;
  anyflash_forward_options options;
  anyflash_kvcache_options cache;
} CacheProblem;

static void make_cache(CacheProblem* c, int paged) {
  const anyflash_forward_options options = ANYFLASH_FORWARD_OPTIONS_INIT;
  const anyflash_kvcache_options cache = ANYFLASH_KVCACHE_OPTIONS_INIT;
  const int64_t pages[4] = {2, 2, 1, 2}, rows[4] = {1, 4, 1, 2};
  make_problem(&c->p);
  for (int i = 0; i < 8; ++i) c->k[i] = c->v[i] = NAN;
  for (int i = 0; i < 6; ++i) {
    const int at = paged ? (i + 4) % 8 : i;
    c->k[at] = c->p.k[i];
    c->v[at] = c->p.v[i];
  }
  memcpy(c->k_before, c->k, sizeof c->k);
  memcpy(c->v_before, c->v, sizeof c->v);
  memcpy(c->cache_shape, paged ? pages : rows, sizeof pages);
  c->table[0] = 1;
  c->table[1] = 0;
  c->length[0] = 3;
  c->table_shape[0] = c->one[0] = 1;
  c->table_shape[1] = 2;
  c->tensor_k = tensor(c->k, 4, c->cache_shape);
  c->tensor_v = tensor(c->v, 4, c->cache_shape);
  c->tensor_table = typed(c->table, 2, c->table_shape, kDLInt, 32);
  c->tensor_length = typed(c->length, 1, c->one, kDLInt, 32);
  c->options = options;
  c->options.has_softmax_scale = 1;
  c->options.softmax_scale = 1.0;
  c->cache = cache;
  c->cache.cache_seqlens = &c->tensor_length;
  if (paged) c->cache.block_table = &c->tensor_table;
}

static anyflash_status run_with_values(CacheProblem* c, const DLTensor* v,
                                       const anyflash_kvcache_options* cache) {
  Problem* const p = &c->p;
  size_t bytes = 0;
  anyflash_status status = anyflash_forward_with_kvcache_workspace_size(
      &p->tensor_q, &c->tensor_k, v, &p->tensor_out, &p->tensor_lse, &c->options, cache, &bytes);
  if (status != ANYFLASH_OK) return status;
  void* const workspace = malloc(bytes);
  status = anyflash_forward_with_kvcache(&p->tensor_q, &c->tensor_k, v, &p->tensor_out,
                                         &p->tensor_lse, &c->options, cache, workspace, bytes);
  free(workspace);
  return status;
}

static anyflash_status run_cache(CacheProblem* c, const anyflash_kvcache_options* cache) {
  return run_with_values(c, &c->tensor_v, cache);
}

static anyflash_status run_latent(CacheProblem* c) { return run_with_values(c, NULL, &c->cache); }

static void expect_cache(CacheProblem* c, const anyflash_kvcache_options* cache,
                         anyflash_status status, const char* words) {
  const char* const function = "anyflash_forward_with_kvcache";
  CHECK(run_cache(c, cache) == status);
  CHECK(strstr(anyflash_last_error(), function) == anyflash_last_error());
  CHECK(strstr(anyflash_last_error(), words) != NULL);
  CHECK(untouched(&c->p));
  CHECK(memcmp(c->k, c->k_before, sizeof c->k) == 0);
  CHECK(memcmp(c->v, c->v_before, sizeof c->v) == 0);
}

/* Rows with weights 1, 2, 3 and 4, 1, 1. */
static void check_results(const Problem* p) {
  CHECK(near(p->out[0], (6 - 12 + 180) / 6.0) && near(p->out[1], (12 + 6) / 6.0));
  CHECK(near(p->out[2], (24 - 6 + 60) / 6.0) && near(p->out[3], (48 + 3) / 6.0));
  CHECK(near(p->lse[0], log(6)) && near(p->lse[1], log(6)));
}

static void check_hand_computed(void) {
  CacheProblem c;
  for (int paged = 0; paged < 2; ++paged) {
    make_cache(&c, paged);
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    check_results(&c.p);
    /* One more row, which is NaN. */
    make_cache(&c, paged);
    c.length[0] = 4;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    CHECK(isnan(c.p.out[0]));
    /* Causal: row 0 sees keys 0 and 1, with 1/3 and 2/3. */
    make_cache(&c, paged);
    c.options.causal = 1;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    CHECK(near(c.p.out[0], (6 - 12) / 3.0) && near(c.p.lse[0], log(3)));
  }
  make_cache(&c, 0); /* no options: all rows */
  c.cache_shape[1] = 3;
  CHECK(run_cache(&c, NULL) == ANYFLASH_OK);
  check_results(&c.p);
}

/* The last key is appended; the scores are those of unrotated keys where the angle is 0. */
static void check_append(void) {
  for (int neox = 0; neox < 2; ++neox) {
    CacheProblem c;
    float cos_table[3] = {1, 1, 1}, sin_table[3] = {0, 0, 0};
    int64_t row[4] = {1, 1, 1, 2}, tables[2] = {3, 1};
    make_cache(&c, 1);
    const DLTensor k_new = tensor(&c.p.k[4], 4, row), v_new = tensor(&c.p.v[4], 4, row);
    const DLTensor cos = tensor(cos_table, 2, tables), sin = tensor(sin_table, 2, tables);
    c.k[0] = c.k[1] = c.v[0] = c.v[1] = NAN; /* row 2 is the first of page 0 */
    c.length[0] = 2;
    c.cache.k_new = &k_new;
    c.cache.v_new = &v_new;
    c.cache.rotary_cos = &cos;
    c.cache.rotary_sin = &sin;
    c.cache.rotary_neox = neox;
    c.cache.num_splits = 2;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    check_results(&c.p);
    CHECK(c.k[0] == c.p.k[4] && c.k[1] == c.p.k[5] && c.v[0] == 60 && c.v[1] == 0);
    CHECK(isnan(c.k[2]) && isnan(c.v[3]));

    /* A quarter turn: (x1, x2) becomes (-x2, x1). */
    cos_table[2] = 0;
    sin_table[2] = 1;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    CHECK(c.k[0] == -c.p.k[5] && c.k[1] == c.p.k[4] && c.v[0] == 60 && c.v[1] == 0);
    cos_table[0] = 5; /* rows 0 and 1 are not read */
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK && c.k[1] == c.p.k[4]);

    /* By another row than that of the key. An older caller does not have the field. */
    int32_t zero[1] = {0};
    const DLTensor rotation = typed(zero, 1, c.one, kDLInt, 32);
    c.cache.rotary_seqlens = &rotation;
    c.options.causal = 1; /* of two queries, the second one by row 1 */
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK && c.k[0] == 5 * c.p.k[4]);
    c.cache.size = offsetof(anyflash_kvcache_options, rotary_seqlens);
    c.options.causal = 0;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK && c.k[1] == c.p.k[4]);
  }
}

/* The two layouts of pairs, four columns: 90 degrees for the first pair, 0 for the second. */
static void check_pairs(void) {
  const float expected[2][4] = {{-2, 1, 3, 4}, {-3, 2, 1, 4}};
  for (int neox = 0; neox < 2; ++neox) {
    float q[4] = {0, 0, 0, 0}, k[4] = {0, 0, 0, 0}, v[1] = {0}, out[1] = {0};
    float k_new[4] = {1, 2, 3, 4}, v_new[1] = {7}, cos_table[2] = {0, 1}, sin_table[2] = {1, 0};
    int32_t zero[1] = {0};
    int64_t wide[4] = {1, 1, 1, 4}, narrow[4] = {1, 1, 1, 1}, tables[2] = {1, 2}, one[1] = {1};
    const DLTensor tq = tensor(q, 4, wide), tk = tensor(k, 4, wide), tv = tensor(v, 4, narrow);
    const DLTensor to = tensor(out, 4, narrow), tk_new = tensor(k_new, 4, wide);
    const DLTensor tv_new = tensor(v_new, 4, narrow), cos = tensor(cos_table, 2, tables);
    const DLTensor sin = tensor(sin_table, 2, tables), length = typed(zero, 1, one, kDLInt, 32);
    anyflash_kvcache_options cache = ANYFLASH_KVCACHE_OPTIONS_INIT;
    cache.cache_seqlens = &length;
    cache.k_new = &tk_new;
    cache.v_new = &tv_new;
    cache.rotary_cos = &cos;
    cache.rotary_sin = &sin;
    cache.rotary_neox = neox;
    cache.split_size = 64;
    size_t bytes = 0;
    CHECK(anyflash_forward_with_kvcache_workspace_size(&tq, &tk, &tv, &to, NULL, NULL, &cache,
                                                       &bytes) == ANYFLASH_OK);
    void* const workspace = malloc(bytes);
    CHECK(anyflash_forward_with_kvcache(&tq, &tk, &tv, &to, NULL, NULL, &cache, workspace, bytes) ==
          ANYFLASH_OK);
    free(workspace);
    CHECK(memcmp(k, expected[neox], sizeof k) == 0);
    CHECK(v[0] == 7 && out[0] == 7);
  }
}

/* Values that are the first columns of the keys, which alone are appended to. */
static void check_latent(void) {
  CacheProblem c;
  int64_t row[4] = {1, 1, 1, 2}, narrow[4] = {1, 2, 1, 1};
  for (int paged = 0; paged < 2; ++paged) {
    make_cache(&c, paged);
    c.p.tensor_out.shape = narrow;
    c.cache.head_dim_v = 1;
    CHECK(run_latent(&c) == ANYFLASH_OK);
    CHECK(near(c.p.out[0], (2 * log(2) + 3 * log(3)) / 6) && c.p.out[2] == -77);
    CHECK(near(c.p.out[1], (log(2) + log(3)) / 6) && near(c.p.lse[1], log(6)));
  }
  make_cache(&c, 1);
  const DLTensor k_new = tensor(&c.p.k[4], 4, row);
  c.k[0] = c.k[1] = NAN; /* row 2 is the first of page 0 */
  c.length[0] = 2;
  c.cache.k_new = &k_new;
  c.cache.head_dim_v = 2;
  CHECK(run_latent(&c) == ANYFLASH_OK);
  CHECK(c.k[0] == c.p.k[4] && c.k[1] == c.p.k[5] && near(c.p.lse[0], log(6)));

  make_cache(&c, 0);
  c.cache.head_dim_v = 2;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, "v_cache is given with head_dim_v");
  c.cache.size = offsetof(anyflash_kvcache_options, head_dim_v); /* an older caller */
  CHECK(run_latent(&c) == ANYFLASH_INVALID_VALUE && untouched(&c.p));
  CHECK(strstr(anyflash_last_error(), "v_cache is missing") != NULL);
  CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
}

/* Bytes of each 8-bit type. 0x44 is 3 in float8_e4m3fn, 0x42 in float8_e5m2; 0x7f is NaN. */
static void check_8bit(void) {
  const uint8_t code[3] = {kDLInt, kDLFloat8_e4m3fn, kDLFloat8_e5m2};
  const unsigned char three[3] = {3, 0x44, 0x42};
  for (int type = 0; type < 3; ++type) {
    CacheProblem c;
    unsigned char k[8] = {0}, v[8];
    float scale[1] = {0.5f};
    make_cache(&c, 0);
    memset(v, three[type], sizeof v);
    if (type != 0) v[6] = v[7] = 0x7f;
    const DLTensor v_scale = tensor(scale, 1, c.one);
    c.tensor_k = typed(k, 4, c.cache_shape, code[type], 8);
    c.tensor_v = typed(v, 4, c.cache_shape, code[type], 8);
    c.cache.v_scale = &v_scale;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    for (int i = 0; i < 4; ++i) CHECK(near(c.p.out[i], 1.5));
    CHECK(near(c.p.lse[0], log(3)));
    c.length[0] = 4;
    CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
    CHECK(type != 0 ? isnan(c.p.out[0]) : near(c.p.out[0], 1.5));
  }
}

static void check_errors(void) {
  CacheProblem c;
  size_t bytes = 7;
  const DLTensor* t[4];
  const char* const names[4] = {"q is NULL", "k_cache is NULL", "v_cache is missing",
                                "out is NULL"};
  make_cache(&c, 0);
  for (int missing = 0; missing < 4; ++missing) {
    t[0] = &c.p.tensor_q;
    t[1] = &c.tensor_k;
    t[2] = &c.tensor_v;
    t[3] = &c.p.tensor_out;
    t[missing] = NULL;
    CHECK(anyflash_forward_with_kvcache_workspace_size(t[0], t[1], t[2], t[3], NULL, NULL, NULL,
                                                       &bytes) == ANYFLASH_INVALID_VALUE);
    CHECK(strstr(anyflash_last_error(), names[missing]) != NULL);
    CHECK(anyflash_forward_with_kvcache(t[0], t[1], t[2], t[3], NULL, NULL, NULL, NULL, 0) ==
          ANYFLASH_INVALID_VALUE);
    CHECK(strstr(anyflash_last_error(), names[missing]) != NULL);
  }
  CHECK(bytes == 7);
  CHECK(anyflash_forward_with_kvcache_workspace_size(&c.p.tensor_q, &c.tensor_k, &c.tensor_v,
                                                     &c.p.tensor_out, NULL, &c.options, &c.cache,
                                                     NULL) == ANYFLASH_INVALID_VALUE);
  CHECK(strstr(anyflash_last_error(), "bytes is NULL") != NULL);

  c.tensor_k.dtype.code = kDLComplex;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE,
               "k_cache is complex32; float64, float32, float16, bfloat16, int8, float8_e4m3fn");
  c.tensor_k.dtype.code = kDLFloat8_e4m3;
  c.tensor_k.dtype.bits = 8;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE, "k_cache is type code 8, bits 8; float64");
  c.tensor_k.dtype.code = kDLFloat8_e4m3fn;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE,
               "v_cache is float32, but k_cache is float8_e4m3fn");
  /* Without a cache, 8 bits are not allowed. */
  c.p.tensor_k.dtype = c.tensor_k.dtype;
  expect(&c.p, NULL, ANYFLASH_INVALID_TYPE, "k is float8_e4m3fn; float64, float32");
  c.p.tensor_q.dtype.code = kDLInt;
  c.p.tensor_q.dtype.bits = 8;
  expect(&c.p, NULL, ANYFLASH_INVALID_TYPE, "q is int8; float64, float32");
  make_cache(&c, 0);
  c.tensor_length.dtype.bits = 64;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE, "cache_seqlens is int64; it must be int32");
  make_cache(&c, 0);
  c.p.tensor_lse.dtype.bits = 8;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE, "lse is float8; it must be float32");
  make_cache(&c, 0);
  const DLTensor scale = typed(c.length, 1, c.p.q_shape, kDLInt, 16);
  c.cache.v_scale = &scale;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE, "v_scale is int16; it must be float32");
  make_cache(&c, 0);
  c.length[0] = 5;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, "cache_seqlens[0] is 5; 0 to 4 is allowed");
  make_cache(&c, 0);
  c.options.bias = &c.tensor_k;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, "bias is given");
}

/* Each field arrives as itself. */
static void check_fields(void) {
  static const struct {
    size_t offset;
    uint8_t code;
    const char* words;
  } kFields[] = {
      {offsetof(anyflash_kvcache_options, cache_seqlens), kDLInt, "cache_seqlens has 3 dim"},
      {offsetof(anyflash_kvcache_options, cache_batch_idx), kDLInt, "cache_batch_idx has 3 dim"},
      {offsetof(anyflash_kvcache_options, cache_leftpad), kDLInt, "cache_leftpad has 3 dim"},
      {offsetof(anyflash_kvcache_options, block_table), kDLInt, "block_table has 3 dim"},
      {offsetof(anyflash_kvcache_options, k_new), kDLFloat, "k_new is given without v_new"},
      {offsetof(anyflash_kvcache_options, v_new), kDLFloat, "v_new is given without k_new"},
      {offsetof(anyflash_kvcache_options, rotary_cos), kDLFloat, "rotary_cos is given without"},
      {offsetof(anyflash_kvcache_options, rotary_sin), kDLFloat, "rotary_sin is given without"},
      {offsetof(anyflash_kvcache_options, rotary_seqlens), kDLInt,
       "rotary_seqlens is given without rotary_cos"},
      {offsetof(anyflash_kvcache_options, tree_mask), kDLBool, "tree_mask has shape (1, 1, 1)"},
      {offsetof(anyflash_kvcache_options, k_scale), kDLFloat, "k_scale is given, but k_cache"},
      {offsetof(anyflash_kvcache_options, v_scale), kDLFloat, "v_scale is given, but k_cache"},
  };
  int32_t data[1] = {0};
  int64_t shape[3] = {1, 1, 1};
  for (size_t i = 0; i < sizeof kFields / sizeof kFields[0]; ++i) {
    CacheProblem c;
    const DLTensor t = typed(data, 3, shape, kFields[i].code, kFields[i].code == kDLBool ? 8 : 32);
    const DLTensor* const address = &t;
    make_cache(&c, 0);
    memcpy((char*)&c.cache + kFields[i].offset, &address, sizeof address);
    expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, kFields[i].words);
  }
  /* A type that no tensor may have: the name, and what it may. */
  static const char* const kTypes[] = {
      "cache_seqlens is int16; it must be int32",  "cache_batch_idx is int16; it must be int32",
      "cache_leftpad is int16; it must be int32",  "block_table is int16; it must be int32",
      "k_new is int16; float64, float32",          "v_new is int16; float64, float32",
      "rotary_cos is int16; float64, float32",     "rotary_sin is int16; float64, float32",
      "rotary_seqlens is int16; it must be int32", "tree_mask is int16; it must be bool",
      "k_scale is int16; it must be float32",      "v_scale is int16; it must be float32"};
  for (size_t i = 0; i < sizeof kFields / sizeof kFields[0]; ++i) {
    CacheProblem c;
    const DLTensor t = typed(data, 3, shape, kDLInt, 16);
    const DLTensor* const address = &t;
    make_cache(&c, 0);
    memcpy((char*)&c.cache + kFields[i].offset, &address, sizeof address);
    expect_cache(&c, &c.cache, ANYFLASH_INVALID_TYPE, kTypes[i]);
  }
  CacheProblem c;
  make_cache(&c, 0);
  c.cache.num_splits = -5;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, "num_splits is -5");
  c.cache.num_splits = 0;
  c.cache.split_size = 65;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE, "split_size is 65");
}

typedef struct {
  anyflash_kvcache_options known;
  uint64_t unknown;
} NewerOptions;

static void check_option_sizes(void) {
  CacheProblem c;
  make_cache(&c, 1);
  c.cache.size = offsetof(anyflash_kvcache_options, rotary_neox); /* an older caller */
  memset(&c.cache.rotary_neox, 0xab, sizeof c.cache - c.cache.size);
  CHECK(run_cache(&c, &c.cache) == ANYFLASH_OK);
  check_results(&c.p);
  make_cache(&c, 1);
  c.cache.size = 0;
  expect_cache(&c, &c.cache, ANYFLASH_INVALID_VALUE,
               "options.size is 0; it must be sizeof(anyflash_kvcache_options)");

  make_cache(&c, 1);
  NewerOptions newer = {c.cache, 0};
  newer.known.size = sizeof newer;
  CHECK(run_cache(&c, &newer.known) == ANYFLASH_OK);
  check_results(&c.p);
  make_cache(&c, 1);
  newer.unknown = 1;
  expect_cache(&c, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
  newer.unknown = 0;
  newer.known.reserved = 1;
  expect_cache(&c, &newer.known, ANYFLASH_UNSUPPORTED, ANYFLASH_VERSION_STRING);
}

int main(void) {
  check_hand_computed();
  check_append();
  check_pairs();
  check_latent();
  check_8bit();
  check_errors();
  check_fields();
  check_option_sizes();
  if (failures == 0) puts("all checks passed");
  return failures != 0;
}
