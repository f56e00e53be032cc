/* cuDNN: one engine for every operation. Its workspace is that of attention's engines on an H100 with torch 2.11
 * and CUDA 13 (docs/internals/measured.md). Numbers: cudnn_graph.h of cuDNN 9. */
#include <stddef.h>
#include <stdint.h>

enum {
  ENGINE_HEURISTICS_RESULTS = 202,
  CONFIG_ENGINE = 300,
  CONFIG_KNOBS = 302,
  CONFIG_WORKSPACE_BYTES = 303,
  CONFIG_SHARED_BYTES = 304,
  PLAN_WORKSPACE_BYTES = 402,
  ENGINE_INDEX = 1301,
  TYPE_INT64 = 3,
  WORKSPACE_BYTES = 256
};

static int descriptor;

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
int cudnnGetProperty(int part, int *value) {
  const int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
  *value = parts[part];
  return 0;
}
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
int cudnnCreate(void **handle) { *handle = &descriptor; return 0; }
int cudnnBackendCreateDescriptor(int type, void **made) { (void)type; *made = &descriptor; return 0; }
int cudnnBackendGetAttribute(void *of, int name, int type, int64_t wanted, int64_t *found, void *values) {
  (void)of, (void)wanted;
  int64_t ignored;
  if (found == NULL) found = &ignored;
  *found = name == ENGINE_HEURISTICS_RESULTS || (name >= CONFIG_ENGINE && name <= CONFIG_SHARED_BYTES) ||
           name == PLAN_WORKSPACE_BYTES || name == ENGINE_INDEX;
  if (name == CONFIG_KNOBS) *found = 0;
  if (name == CONFIG_SHARED_BYTES && values != NULL) *(int32_t *)values = 0;
  else if (*found && values != NULL && type == TYPE_INT64)
    *(int64_t *)values = name == CONFIG_WORKSPACE_BYTES || name == PLAN_WORKSPACE_BYTES ? WORKSPACE_BYTES : 0;
  return 0;
}
int drycuda_count(const char *);
int cudnnBackendExecute(void *handle, void *plan, void *pack) {
  (void)handle, (void)plan, (void)pack;
  return drycuda_count("cuDNN plans executed");
}
