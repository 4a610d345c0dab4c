/* Everything that can be wrong in a call of the C ABI, one thing at a time, under Address and
 * Undefined Behaviour Sanitizer: each call must return a status and a message, and must not have
 * written. */
#include "calls.h"

static int refusals = 0;

/* `size_too`: already the question for the workspace's size is refused. */
static void refused(Call* c, const char* argument, const char* change, int size_too) {
  char what[200];
  size_t bytes = 77;
  snprintf(what, sizeof what, "%s %s", argument, change);
  ++refusals;
  if (size_too && c->size != NULL) {
    if (c->size(c, &bytes) == ANYFLASH_OK) fail(c, what, "has a size");
    if (bytes != 77) fail(c, what, "the size is written");
  }
  const anyflash_status status = c->run(c);
  const char* const message = anyflash_last_error();
  if (status == ANYFLASH_OK || status == ANYFLASH_INTERNAL_ERROR) fail(c, what, "is not refused");
  if (strncmp(message, c->function, strcspn(c->function, " ")) != 0 ||
      strlen(message) < strcspn(c->function, " ") + 10) {
    fail(c, what, "has no message");
  }
  for (int i = 0; i < c->count; ++i) {
    const Argument* const a = &c->arguments[i];
    if (memcmp(a->data, a->before, a->bytes) != 0) {
      fail(c, what, "something has been written");
      memcpy(a->data, a->before, a->bytes);
    }
  }
}

static void wrong_tensor(Call* c, int index) {
  Argument* const a = &c->arguments[index];
  DLTensor* const t = &a->tensor;
  const Argument valid = *a;
  if (index < c->required) {
    c->given[index] = NULL;
    refused(c, a->name, "is NULL", 1);
    c->given[index] = t;
  }

#define WRONG(change, text)                         \
  do {                                              \
    change;                                         \
    refused(c, a->name, text, 1);                   \
    *t = valid.tensor;                              \
    memcpy(a->shape, valid.shape, sizeof a->shape); \
  } while (0)

  WRONG(t->data = NULL, "has no data");
  WRONG(t->shape = NULL, "has no shape");
  WRONG(t->data = (char*)t->data + 1, "is misaligned");
  WRONG(t->byte_offset = 2, "is misaligned by its offset");
  WRONG(t->ndim = 0, "has no dimensions");
  WRONG(t->ndim = -1, "has -1 dimensions");
  WRONG(t->ndim = 5, "has 5 dimensions");
  WRONG(t->dtype.bits = 64; t->dtype.code = kDLComplex, "is complex");
  WRONG(t->dtype.bits = 16; t->dtype.code = kDLInt, "is int16");
  WRONG(t->dtype.lanes = 4, "has lanes");
  WRONG(t->device.device_type = kDLVulkan, "is on another kind of device");
  WRONG(t->device.device_type = kDLCUDA;
        t->device.device_id = 99, "is on a device that is not there");
  for (int axis = 0; axis < valid.tensor.ndim; ++axis) {
    /* Not the rows of tables, which may have more than are used. */
    const int open = strncmp(a->name, "rotary", 6) == 0 || strstr(a->name, "_cache") != NULL ||
                     strcmp(a->name, "block_table") == 0;
    WRONG(a->shape[axis] = -1, "has a negative extent");
    WRONG(a->shape[axis] = INT64_MAX, "has a huge extent");
    if (!(open && axis < 2)) WRONG(a->shape[axis] += 1, "is too long");
  }
  if (valid.output) {
    int64_t strides[4] = {0, 0, 0, 0};
    WRONG(t->strides = strides, "repeats elements");
  }
#undef WRONG
}

static void wrong_options(Call* c, int index) {
  Options* const o = &c->options[index];
  void* const valid = o->data;
  const size_t sizes[] = {0, 1, sizeof(size_t) - 1, (size_t)1 << 40, (size_t)-1};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
    o->data = copy_of(valid, o->size);
    memcpy(o->data, &sizes[i], sizeof sizes[i]);
    refused(c, "options", "of a wrong size", 1);
    free(o->data);
  }
  const int32_t one = 1;
  o->data = copy_of(valid, o->size);
  memcpy((char*)o->data + o->reserved, &one, sizeof one);
  refused(c, "options", "with a reserved field", 1);
  free(o->data);

  /* Of a newer version: what this one does not know must be zero. */
  const size_t newer = o->size + 24;
  o->data = calloc(1, newer);
  memcpy(o->data, valid, o->size);
  memcpy(o->data, &newer, sizeof newer);
  for (size_t at = o->size; at < newer; ++at) {
    ((char*)o->data)[at] = 1;
    refused(c, "options", "of a newer version", 1);
    ((char*)o->data)[at] = 0;
  }
  if (c->run(c) != ANYFLASH_OK) fail(c, "newer options that set nothing", "are refused");
  for (int i = 0; i < c->count; ++i) { /* the cache may have been appended to again */
    memcpy(c->arguments[i].data, c->arguments[i].before, c->arguments[i].bytes);
  }
  free(o->data);
  o->data = valid;
}

static void wrong_workspace(Call* c) {
  void* const valid = c->workspace;
  const size_t bytes = c->workspace_bytes;
  if (bytes == 0) {
    fail(c, "workspace", "is not needed: nothing to test");
    return;
  }
  if (c->size(c, NULL) == ANYFLASH_OK) fail(c, "bytes", "may be NULL");
  c->workspace = NULL;
  refused(c, "workspace", "is NULL", 0);
  c->workspace = valid;
  c->workspace_bytes = bytes - 1;
  refused(c, "workspace", "is a byte too small", 0);
  c->workspace_bytes = 0;
  refused(c, "workspace", "has no bytes", 0);
  c->workspace_bytes = bytes;
}

/* All tensors on a GPU that is not there: nothing may be read through their addresses either. */
static void wrong_device(Call* c) {
  for (int device = -1; device < 100; device += 100) {
    for (int i = 0; i < c->count; ++i) {
      DLTensor* const t = &c->arguments[i].tensor;
      t->device.device_type = kDLCUDA;
      t->device.device_id = device;
      t->dtype.bits = t->dtype.code == kDLFloat && t->shape[t->ndim - 1] == DIM ? 16 : 32;
    }
    refused(c, "all tensors", "on a GPU that is not there", 1);
  }
  for (int i = 0; i < c->count; ++i) {
    c->arguments[i].tensor.device.device_type = kDLCPU;
    c->arguments[i].tensor.device.device_id = 0;
    c->arguments[i].tensor.dtype.bits = 32;
  }
}

/* Integers that say how long something is, or where. */
static void wrong_lengths(Call* c) {
  for (int i = 0; i < c->count; ++i) {
    const Argument* const a = &c->arguments[i];
    if (a->tensor.dtype.code != kDLInt) continue;
    const int32_t wrong[] = {-1, INT32_MIN, 1000, INT32_MAX};
    for (int w = 0; w < 4; ++w) {
      for (size_t at = 0; at < a->bytes / sizeof(int32_t); ++at) {
        int32_t* const place = (int32_t*)a->data + at;
        int32_t* const expected = (int32_t*)a->before + at;
        const int32_t before = *place;
        *place = *expected = wrong[w];
        refused(c, a->name, "has a wrong element", 0);
        *place = *expected = before;
      }
    }
  }
}

static void check(Call* c) {
  for (int i = 0; i < c->count; ++i) wrong_tensor(c, i);
  for (int i = 0; i < c->options_count; ++i) wrong_options(c, i);
  if (c->size != NULL) wrong_workspace(c);
  wrong_device(c);
  wrong_lengths(c);
  if (c->run(c) != ANYFLASH_OK) fail(c, "the valid call", "is refused afterwards");
  end(c);
}

int main(void) {
  Call call;
  make_forward(&call, 0);
  check(&call);
  make_forward(&call, 1);
  check(&call);
  make_backward(&call);
  check(&call);
  make_kvcache(&call);
  check(&call);
  make_merge(&call);
  check(&call);
  printf("%d calls refused, %d failures\n", refusals, failures);
  return failures != 0;
}
