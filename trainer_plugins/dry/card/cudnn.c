/* cuDNN: one engine for every operation, which needs no workspace. What a real engine would ask for is not known.
 * Numbers: cudnn_graph.h of cuDNN 9. */
#include <stddef.h>
#include <stdint.h>

enum { ENGINE_HEURISTICS_RESULTS = 202, PLAN_WORKSPACE_BYTES = 402 };

static int descriptor;

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
int cudnnCreate(void **handle) { *handle = &descriptor; return 0; }
int cudnnBackendCreateDescriptor(int type, void **made) { (void)type; *made = &descriptor; return 0; }
int cudnnBackendGetAttribute(void *of, int name, int type, int64_t wanted, int64_t *found, void *values) {
  (void)of, (void)type, (void)wanted;
  int64_t ignored;
  if (found == NULL) found = &ignored;
  *found = name == ENGINE_HEURISTICS_RESULTS || name == PLAN_WORKSPACE_BYTES;
  if (name == PLAN_WORKSPACE_BYTES && values != NULL) *(int64_t *)values = 0;
  return 0;
}
