/* libnvrtc: every program compiles, to one byte that the driver takes and nobody runs. */
#include <stddef.h>

static int program;

int nvrtcVersion(int *major, int *minor) { *major = CUDA_MAJOR, *minor = 0; return 0; }
int nvrtcCreateProgram(void **made) { *made = &program; return 0; }
int nvrtcGetLoweredName(void *of, const char *expression, const char **name) { (void)of, *name = expression; return 0; }

static int size(void *of, size_t *num_bytes) { (void)of, *num_bytes = 1; return 0; }
int nvrtcGetPTXSize(void *of, size_t *num_bytes) { return size(of, num_bytes); }
int nvrtcGetCUBINSize(void *of, size_t *num_bytes) { return size(of, num_bytes); }
int nvrtcGetProgramLogSize(void *of, size_t *num_bytes) { return size(of, num_bytes); }

static int text(void *of, char *found) { (void)of, *found = 0; return 0; }
int nvrtcGetPTX(void *of, char *found) { return text(of, found); }
int nvrtcGetCUBIN(void *of, char *found) { return text(of, found); }
int nvrtcGetProgramLog(void *of, char *found) { return text(of, found); }
