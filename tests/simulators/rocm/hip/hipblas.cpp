// libhipblas: the matrix products of the product, column-major as BLAS has them, summed in float; everything else is not
// there. What a GPU would fault on, an operand outside of memory a device can reach, is an error here.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <vector>

#define HIP_API extern "C" __attribute__((visibility("default")))
extern "C" bool standin_reaches(const void *address, size_t bytes);
extern "C" bool standin_idle();
bool captured(const void *stream, const std::function<int()> &work);
extern "C" int hipGetDevice(int *device);
extern "C" int hipGetStreamDeviceId(void *stream);

namespace {

enum Status {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 3,
    MAPPING_ERROR = 4,
    EXECUTION_FAILED = 5,
    NOT_SUPPORTED = 7,
    INVALID_ENUM = 10,
};
enum Operation { NONE = 111, TRANSPOSED = 112, CONJUGATED = 113 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum ComputeType { COMPUTE_32F = 2 };
enum PointerMode { HOST = 0, DEVICE = 1 };
constexpr int GEMM_DEFAULT = 160;

struct Handle {
    void *stream;
    int pointer_mode;
    int device;
};

std::mutex lock;
std::set<const void *> &handles() {
    static auto *live = new std::set<const void *>;
    return *live;
}

int device() {
    int current = -1;
    return hipGetDevice(&current) ? -1 : current;
}

// A handle is its device's.
Status check(const Handle *handle) {
    std::lock_guard<std::mutex> hold(lock);
    if (!handles().count(handle)) return NOT_INITIALIZED;
    return handle->device == device() ? SUCCESS : EXECUTION_FAILED;
}

size_t bytes_of(int type) { return type == R_32F ? 4 : type == R_16F || type == R_16BF ? 2 : 0; }

// Compiled twice, and chosen by what the processor has.
#define FOR_EACH_CPU __attribute__((target_clones("arch=haswell", "default")))

FOR_EACH_CPU void to_floats(float *to, const void *from, size_t count, int type) {
    if (type == R_32F) {
        memcpy(to, from, 4 * count);
    } else if (type == R_16F) {
        for (size_t i = 0; i < count; i++) to[i] = (float)((const _Float16 *)from)[i];
    } else {
        for (size_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
            memcpy(to + i, &bits, 4);
        }
    }
}

// bfloat16 to the nearest, ties to even; a NaN stays one.
uint16_t bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

FOR_EACH_CPU void from_floats(void *to, const float *from, size_t count, int type) {
    if (type == R_32F) {
        memcpy(to, from, 4 * count);
    } else if (type == R_16F) {
        for (size_t i = 0; i < count; i++) ((_Float16 *)to)[i] = (_Float16)from[i];
    } else {
        for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = bfloat(from[i]);
    }
}

// c[i, column] += a[i, p] * b[p, column] for p in order, of ROWS rows at most, which stay in the first cache. What an
// element gets does not depend on which others are there.
constexpr int ROWS = 256, COLUMNS = 4, DEPTH = 4;
FOR_EACH_CPU void multiply_tile(
    float *__restrict c, size_t stride, const float *a, size_t a_stride, const float *b, size_t b_stride, int rows, int k) {
    int p = 0;
    for (; p + DEPTH <= k; p += DEPTH) {
        const float *a0 = a + (size_t)p * a_stride, *a1 = a0 + a_stride, *a2 = a1 + a_stride, *a3 = a2 + a_stride;
        for (int j = 0; j < COLUMNS; j++) {
            float *to = c + (size_t)j * stride;
            const float *with = b + (size_t)j * b_stride + p;
            float b0 = with[0], b1 = with[1], b2 = with[2], b3 = with[3];
            for (int i = 0; i < rows; i++) to[i] = to[i] + a0[i] * b0 + a1[i] * b1 + a2[i] * b2 + a3[i] * b3;
        }
    }
    for (; p < k; p++) {
        const float *a0 = a + (size_t)p * a_stride;
        for (int j = 0; j < COLUMNS; j++)
            for (int i = 0; i < rows; i++) c[(size_t)j * stride + (size_t)i] += a0[i] * b[(size_t)j * b_stride + (size_t)p];
    }
}

struct Matrix {
    const char *at;
    int type;
    int lead;  // elements from one column to the next
};

// op(matrix) as floats, column by column, `columns` rounded up to whole tiles.
std::vector<float> unpack(const Matrix &matrix, int operation, int rows, int columns, int room) {
    std::vector<float> unpacked((size_t)rows * (size_t)room);
    size_t element = bytes_of(matrix.type), lead = (size_t)matrix.lead;
    if (operation == NONE) {
        for (int j = 0; j < columns; j++)
            to_floats(&unpacked[(size_t)j * (size_t)rows], matrix.at + (size_t)j * lead * element, (size_t)rows, matrix.type);
        return unpacked;
    }
    std::vector<float> line((size_t)columns);
    constexpr int BLOCK = 64;  // columns that are written while their lines are cached
    for (int j = 0; j < columns; j += BLOCK) {
        int some = std::min(BLOCK, columns - j);
        for (int i = 0; i < rows; i++) {
            to_floats(line.data(), matrix.at + ((size_t)i * lead + (size_t)j) * element, (size_t)some, matrix.type);
            for (int n = 0; n < some; n++) unpacked[(size_t)(j + n) * (size_t)rows + (size_t)i] = line[(size_t)n];
        }
    }
    return unpacked;
}

void multiply(const Matrix &a, int a_operation, const Matrix &b, int b_operation, char *c, int c_type, int c_lead, int m,
              int n, int k, float alpha, float beta) {
    int room = (n + COLUMNS - 1) / COLUMNS * COLUMNS;
    std::vector<float> left = unpack(a, a_operation, m, k, k), right = unpack(b, b_operation, k, n, room);
    std::vector<float> sums((size_t)m * (size_t)room), column((size_t)m);
    for (int j = 0; j < room; j += COLUMNS)
        for (int i = 0; i < m; i += ROWS)
            multiply_tile(&sums[(size_t)j * (size_t)m + (size_t)i], (size_t)m, &left[(size_t)i], (size_t)m,
                          &right[(size_t)j * (size_t)k], (size_t)k, std::min(ROWS, m - i), k);
    for (int j = 0; j < n; j++) {
        char *target = c + (size_t)j * (size_t)c_lead * bytes_of(c_type);
        float *sum = &sums[(size_t)j * (size_t)m];
        for (int i = 0; i < m; i++) sum[i] *= alpha;
        // With a beta of 0 what C held does not count, even if it was NaN.
        if (beta != 0.0f) {
            to_floats(column.data(), target, (size_t)m, c_type);
            for (int i = 0; i < m; i++) sum[i] += beta * column[(size_t)i];
        }
        from_floats(target, sum, (size_t)m, c_type);
    }
}

// Elements from the first to the last of a matrix.
size_t extent(int rows, int columns, int lead) {
    return rows && columns ? (size_t)(columns - 1) * (size_t)lead + (size_t)rows : 0;
}

struct Operand {
    const char *name;
    const void *at;
    int type, lead;
    int64_t stride;
    int rows, columns;

    bool reached(int batch) const {
        size_t last = stride >= 0 ? (size_t)(batch - 1) * (size_t)stride : 0;
        size_t bytes = (last + extent(rows, columns, lead)) * bytes_of(type);
        if (standin_reaches(at, bytes)) return true;
        fprintf(stderr, "stand-in hipBLAS: %s, %zu bytes from %p, is not within memory of a device\n", name, bytes, at);
        return false;
    }
    Matrix matrix(int number) const {
        return {(const char *)at + number * stride * (int64_t)bytes_of(type), type, lead};
    }
};

Status gemm(const Handle *handle, int a_operation, int b_operation, int m, int n, int k, const float *alpha,
            const void *a, int a_type, int a_lead, int64_t a_stride, const void *b, int b_type, int b_lead,
            int64_t b_stride, const float *beta, void *c, int c_type, int c_lead, int64_t c_stride, int batch,
            int compute_type) {
    if (Status status = check(handle)) return status;
    for (int operation : {a_operation, b_operation})
        if (operation != NONE && operation != TRANSPOSED && operation != CONJUGATED) return INVALID_ENUM;
    // Of 16 bits in, and of 16 or 32 out; all of 32 bits.
    if (compute_type != COMPUTE_32F || !bytes_of(a_type) || a_type != b_type) return NOT_SUPPORTED;
    if (c_type != a_type && c_type != R_32F) return NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || batch < 0) return INVALID_VALUE;
    int a_rows = a_operation == NONE ? m : k, b_rows = b_operation == NONE ? k : n;
    if (a_lead < std::max(1, a_rows) || b_lead < std::max(1, b_rows) || c_lead < std::max(1, m)) return INVALID_VALUE;
    if (a_stride < 0 || b_stride < 0 || (batch > 1 && c_stride < (int64_t)extent(m, n, c_lead))) return INVALID_VALUE;
    if (!m || !n || !batch) return SUCCESS;
    if (!alpha || !beta || !a || !b || !c) return INVALID_VALUE;
    if (handle->pointer_mode == DEVICE && (!standin_reaches(alpha, 4) || !standin_reaches(beta, 4))) return MAPPING_ERROR;
    Operand left = {"A", a, a_type, a_lead, a_stride, a_rows, a_operation == NONE ? k : m};
    Operand right = {"B", b, b_type, b_lead, b_stride, b_rows, b_operation == NONE ? n : k};
    Operand out = {"C", c, c_type, c_lead, c_stride, m, n};
    if ((k && (!left.reached(batch) || !right.reached(batch))) || !out.reached(batch)) return MAPPING_ERROR;
    const float by = *alpha, keeping = *beta;
    const auto work = [=] {
        for (int i = 0; i < batch && !standin_idle(); i++)
            multiply(left.matrix(i), a_operation, right.matrix(i), b_operation, (char *)out.matrix(i).at, c_type, c_lead,
                     m, n, k, by, keeping);
        return 0;
    };
    if (!captured(handle->stream, work)) work();
    return SUCCESS;
}

}  // namespace

HIP_API int hipblasCreate(Handle **handle) {
    if (!handle) return INVALID_VALUE;
    int current = device();
    if (current < 0) return NOT_INITIALIZED;
    std::lock_guard<std::mutex> hold(lock);
    *handle = new Handle{nullptr, HOST, current};
    handles().insert(*handle);
    return SUCCESS;
}
HIP_API int hipblasDestroy(Handle *handle) {
    std::lock_guard<std::mutex> hold(lock);
    return handles().erase(handle) ? SUCCESS : NOT_INITIALIZED;
}
HIP_API int hipblasSetStream(Handle *handle, void *stream) {
    if (Status status = check(handle)) return status;
    if (hipGetStreamDeviceId(stream) != handle->device) return INVALID_VALUE;
    handle->stream = stream;
    return SUCCESS;
}
HIP_API int hipblasGetStream(Handle *handle, void **stream) {
    if (Status status = check(handle)) return status;
    if (!stream) return INVALID_VALUE;
    *stream = handle->stream;
    return SUCCESS;
}
HIP_API int hipblasSetPointerMode(Handle *handle, int mode) {
    if (Status status = check(handle)) return status;
    if (mode != HOST && mode != DEVICE) return INVALID_ENUM;
    handle->pointer_mode = mode;
    return SUCCESS;
}
HIP_API int hipblasGetPointerMode(Handle *handle, int *mode) {
    if (Status status = check(handle)) return status;
    if (!mode) return INVALID_VALUE;
    *mode = handle->pointer_mode;
    return SUCCESS;
}

HIP_API int hipblasSgemm(Handle *handle, int a_operation, int b_operation, int m, int n, int k, const float *alpha,
                         const float *a, int a_lead, const float *b, int b_lead, const float *beta, float *c, int c_lead) {
    return gemm(handle, a_operation, b_operation, m, n, k, alpha, a, R_32F, a_lead, 0, b, R_32F, b_lead, 0, beta, c,
                R_32F, c_lead, 0, 1, COMPUTE_32F);
}
HIP_API int hipblasSgemmStridedBatched(
    Handle *handle, int a_operation, int b_operation, int m, int n, int k, const float *alpha, const float *a, int a_lead,
    int64_t a_stride, const float *b, int b_lead, int64_t b_stride, const float *beta, float *c, int c_lead,
    int64_t c_stride, int batch) {
    return gemm(handle, a_operation, b_operation, m, n, k, alpha, a, R_32F, a_lead, a_stride, b, R_32F, b_lead, b_stride,
                beta, c, R_32F, c_lead, c_stride, batch, COMPUTE_32F);
}
HIP_API int hipblasGemmEx(Handle *handle, int a_operation, int b_operation, int m, int n, int k, const void *alpha,
                          const void *a, int a_type, int a_lead, const void *b, int b_type, int b_lead, const void *beta,
                          void *c, int c_type, int c_lead, int compute_type, int algorithm) {
    if (algorithm != GEMM_DEFAULT) return INVALID_ENUM;
    return gemm(handle, a_operation, b_operation, m, n, k, (const float *)alpha, a, a_type, a_lead, 0, b, b_type, b_lead,
                0, (const float *)beta, c, c_type, c_lead, 0, 1, compute_type);
}
HIP_API int hipblasGemmStridedBatchedEx(
    Handle *handle, int a_operation, int b_operation, int m, int n, int k, const void *alpha, const void *a, int a_type,
    int a_lead, int64_t a_stride, const void *b, int b_type, int b_lead, int64_t b_stride, const void *beta, void *c,
    int c_type, int c_lead, int64_t c_stride, int batch, int compute_type, int algorithm) {
    if (algorithm != GEMM_DEFAULT) return INVALID_ENUM;
    return gemm(handle, a_operation, b_operation, m, n, k, (const float *)alpha, a, a_type, a_lead, a_stride, b, b_type,
                b_lead, b_stride, (const float *)beta, c, c_type, c_lead, c_stride, batch, compute_type);
}
