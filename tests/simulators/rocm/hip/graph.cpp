// Stream capture and graphs of what one stream was given: kernels and products, done in their order when a graph is
// launched. With HIPSTANDIN_FAIL=FUNCTION, that function of these fails once.
#include "hip.h"

#include <cstdlib>
#include <cstring>
#include <set>

namespace {

typedef std::vector<std::function<int()>> Work;
struct Graph {
    Work work;
};

// As with streams: what is destroyed leaves the sets, and keeps its memory.
std::mutex lock;
std::set<const void *> &graphs() {
    static auto *live = new std::set<const void *>;
    return *live;
}
std::set<const void *> &executables() {
    static auto *live = new std::set<const void *>;
    return *live;
}

bool fails(const char *function) {
    static bool failed = false;
    const char *named = getenv("HIPSTANDIN_FAIL");
    if (failed || !named || strcmp(named, function) != 0) return false;
    return failed = true;
}

constexpr uintptr_t LAST_DEFAULT_STREAM = 2;
Error capturable(const void *stream) {
    if (stream_device(stream) < 0) return INVALID_HANDLE;
    return (uintptr_t)stream <= LAST_DEFAULT_STREAM ? CAPTURE_UNSUPPORTED : SUCCESS;
}

Error destroy(std::set<const void *> &live, const void *one) {
    std::lock_guard<std::mutex> hold(lock);
    return live.erase(one) ? SUCCESS : INVALID_VALUE;
}

}  // namespace

HIP_API int hipStreamBeginCapture(void *stream, int mode) {
    HIP_BEGIN;
    constexpr int RELAXED = 2;
    if (fails(__func__)) return told(UNKNOWN);
    if (mode < 0 || mode > RELAXED) return told(INVALID_VALUE);
    if (Error error = capturable(stream)) return told(error);
    return told(begin_capture(stream) ? SUCCESS : ILLEGAL_STATE);
}
HIP_API int hipStreamEndCapture(void *stream, Graph **graph) {
    HIP_BEGIN;
    if (!graph) return told(INVALID_VALUE);
    *graph = nullptr;
    if (Error error = capturable(stream)) return told(error);
    Work work;
    if (Error error = end_capture(stream, &work)) return told(error);
    if (fails(__func__)) return told(UNKNOWN);
    std::lock_guard<std::mutex> hold(lock);
    *graph = new Graph{std::move(work)};
    graphs().insert(*graph);
    return SUCCESS;
}
HIP_API int hipGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long flags) {
    HIP_BEGIN;
    if (fails(__func__)) return told(UNKNOWN);
    if (!executable || flags) return told(INVALID_VALUE);
    std::lock_guard<std::mutex> hold(lock);
    if (!graphs().count(graph)) return told(INVALID_VALUE);
    *executable = new Graph{graph->work};
    executables().insert(*executable);
    return SUCCESS;
}
HIP_API int hipGraphLaunch(Graph *executable, void *stream) {
    HIP_BEGIN;
    if (fails(__func__)) return told(UNKNOWN);
    {
        std::lock_guard<std::mutex> hold(lock);
        if (!executables().count(executable)) return told(INVALID_VALUE);
    }
    if (stream_device(stream) < 0) return told(INVALID_HANDLE);
    if (Error error = not_captured(stream)) return told(error);
    for (const auto &one : executable->work)
        if (int error = one()) return told((Error)error);
    return SUCCESS;
}
HIP_API int hipGraphDestroy(Graph *graph) {
    HIP_BEGIN;
    if (fails(__func__)) return told(UNKNOWN);
    return told(destroy(graphs(), graph));
}
HIP_API int hipGraphExecDestroy(Graph *executable) {
    HIP_BEGIN;
    if (fails(__func__)) return told(UNKNOWN);
    return told(destroy(executables(), executable));
}
