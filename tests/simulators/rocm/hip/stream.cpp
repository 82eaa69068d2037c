// Streams and events. All work is done when its call returns, so they order nothing; but one that was destroyed, or never
// made, is an error, and so is an event that was not recorded or belongs to another device than the stream.
#include "hip.h"

#include <chrono>
#include <set>
#include <vector>

namespace {

enum Capture { NONE, ACTIVE, INVALIDATED };

struct Stream {
    unsigned flags;
    int priority;
    int device;
    int capture = NONE;
    std::vector<std::function<int()>> work;  // captured
};
struct Event {
    unsigned flags;
    int device;
    bool recorded;
    std::chrono::steady_clock::time_point at;
};

constexpr unsigned NON_BLOCKING = 1, DISABLE_TIMING = 2, MOST_EVENT_FLAGS = 7;
constexpr uintptr_t DEFAULT_STREAM = 0, LEGACY_STREAM = 1, PER_THREAD_STREAM = 2;

// What is destroyed leaves these sets but keeps its memory: no later one gets its address, so a stale handle is noticed.
std::mutex lock;
std::set<const void *> &streams() {
    static auto *live = new std::set<const void *>;
    return *live;
}
std::set<const void *> &events() {
    static auto *live = new std::set<const void *>;
    return *live;
}

bool is_default(const void *stream) { return (uintptr_t)stream <= PER_THREAD_STREAM; }

bool live_event(const Event *event) {
    std::lock_guard<std::mutex> hold(lock);
    return events().count(event);
}

Error create_stream(Stream **stream, unsigned flags, int priority) {
    if (!stream || flags > NON_BLOCKING) return INVALID_VALUE;
    if (!device_count()) return NO_DEVICE;
    std::lock_guard<std::mutex> hold(lock);
    *stream = new Stream{flags, priority, current_device(), NONE, {}};
    streams().insert(*stream);
    return SUCCESS;
}

Error create_event(Event **event, unsigned flags) {
    if (!event || flags > MOST_EVENT_FLAGS) return INVALID_VALUE;
    if (!device_count()) return NO_DEVICE;
    std::lock_guard<std::mutex> hold(lock);
    *event = new Event{flags, current_device(), false, {}};
    events().insert(*event);
    return SUCCESS;
}

Error check(const void *stream) { return stream_device(stream) >= 0 ? SUCCESS : INVALID_HANDLE; }
Error usable(const void *stream) {
    if (Error error = check(stream)) return error;
    return not_captured(stream);
}

}  // namespace

int stream_device(const void *stream) {
    if (is_default(stream)) return current_device();
    std::lock_guard<std::mutex> hold(lock);
    return streams().count(stream) ? ((const Stream *)stream)->device : -1;
}

bool captured(const void *stream, const std::function<int()> &work) {
    if (is_default(stream)) return false;
    std::lock_guard<std::mutex> hold(lock);
    auto *one = (Stream *)stream;
    if (!streams().count(stream) || one->capture == NONE) return false;
    one->work.push_back(work);
    return true;
}

Error not_captured(const void *stream) {
    if (is_default(stream)) return SUCCESS;
    std::lock_guard<std::mutex> hold(lock);
    auto *one = (Stream *)stream;
    if (!streams().count(stream) || one->capture == NONE) return SUCCESS;
    one->capture = INVALIDATED;
    return CAPTURE_UNSUPPORTED;
}

bool begin_capture(const void *stream) {
    std::lock_guard<std::mutex> hold(lock);
    auto *one = (Stream *)stream;
    if (one->capture != NONE) return false;
    one->capture = ACTIVE;
    one->work.clear();
    return true;
}

Error end_capture(const void *stream, std::vector<std::function<int()>> *work) {
    std::lock_guard<std::mutex> hold(lock);
    auto *one = (Stream *)stream;
    const int state = one->capture;
    one->capture = NONE;
    *work = std::move(one->work);
    one->work.clear();
    return state == NONE ? ILLEGAL_STATE : state == ACTIVE ? SUCCESS : CAPTURE_INVALIDATED;
}

HIP_API int hipStreamCreate(Stream **stream) {
    HIP_BEGIN;
    return told(create_stream(stream, 0, 0));
}
HIP_API int hipStreamCreateWithFlags(Stream **stream, unsigned flags) {
    HIP_BEGIN;
    return told(create_stream(stream, flags, 0));
}
HIP_API int hipStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    HIP_BEGIN;
    return told(create_stream(stream, flags, priority < -1 ? -1 : priority > 1 ? 1 : priority));
}
HIP_API int hipStreamDestroy(Stream *stream) {
    HIP_BEGIN;
    std::lock_guard<std::mutex> hold(lock);
    return told(streams().erase(stream) ? SUCCESS : INVALID_HANDLE);
}
HIP_API int hipStreamSynchronize(Stream *stream) {
    HIP_BEGIN;
    return told(usable(stream));
}
HIP_API int hipStreamQuery(Stream *stream) {
    HIP_BEGIN;
    return told(usable(stream));
}
HIP_API int hipStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    HIP_BEGIN;
    if (flags) return told(INVALID_VALUE);
    return told(live_event(event) ? usable(stream) : INVALID_HANDLE);
}
HIP_API int hipStreamGetFlags(Stream *stream, unsigned *flags) {
    HIP_BEGIN;
    if (!flags) return told(INVALID_VALUE);
    if (check(stream)) return told(INVALID_HANDLE);
    *flags = is_default(stream) ? 0 : stream->flags;
    return SUCCESS;
}
HIP_API int hipStreamGetPriority(Stream *stream, int *priority) {
    HIP_BEGIN;
    if (!priority) return told(INVALID_VALUE);
    if (check(stream)) return told(INVALID_HANDLE);
    *priority = is_default(stream) ? 0 : stream->priority;
    return SUCCESS;
}
HIP_API int hipStreamIsCapturing(Stream *stream, int *status) {
    HIP_BEGIN;
    if (!status) return told(INVALID_VALUE);
    *status = 0;
    if (Error error = check(stream)) return told(error);
    if (!is_default(stream)) *status = stream->capture;
    return SUCCESS;
}
HIP_API int hipStreamAddCallback(
    Stream *stream, void (*callback)(Stream *, int, void *), void *argument, unsigned flags) {
    HIP_BEGIN;
    if (!callback || flags) return told(INVALID_VALUE);
    if (check(stream)) return told(INVALID_HANDLE);
    callback(stream, SUCCESS, argument);
    return SUCCESS;
}
HIP_API int hipLaunchHostFunc(Stream *stream, void (*function)(void *), void *argument) {
    HIP_BEGIN;
    if (!function) return told(INVALID_VALUE);
    if (check(stream)) return told(INVALID_HANDLE);
    function(argument);
    return SUCCESS;
}
// No error code: the device, which of a bad stream is none.
HIP_API int hipGetStreamDeviceId(Stream *stream) { return forked() ? -1 : stream_device(stream); }

HIP_API int hipEventCreate(Event **event) {
    HIP_BEGIN;
    return told(create_event(event, 0));
}
HIP_API int hipEventCreateWithFlags(Event **event, unsigned flags) {
    HIP_BEGIN;
    return told(create_event(event, flags));
}
HIP_API int hipEventDestroy(Event *event) {
    HIP_BEGIN;
    std::lock_guard<std::mutex> hold(lock);
    return told(events().erase(event) ? SUCCESS : INVALID_HANDLE);
}
HIP_API int hipEventRecord(Event *event, Stream *stream) {
    HIP_BEGIN;
    if (!live_event(event) || stream_device(stream) != event->device) return told(INVALID_HANDLE);
    if (Error error = not_captured(stream)) return told(error);
    event->recorded = true;
    event->at = std::chrono::steady_clock::now();
    return SUCCESS;
}
HIP_API int hipEventSynchronize(Event *event) {
    HIP_BEGIN;
    return told(live_event(event) ? SUCCESS : INVALID_HANDLE);
}
HIP_API int hipEventQuery(Event *event) {
    HIP_BEGIN;
    return told(live_event(event) ? SUCCESS : INVALID_HANDLE);
}
HIP_API int hipEventElapsedTime(float *milliseconds, Event *start, Event *stop) {
    HIP_BEGIN;
    if (!milliseconds) return told(INVALID_VALUE);
    for (const Event *event : {start, stop})
        if (!live_event(event) || !event->recorded || event->flags & DISABLE_TIMING) return told(INVALID_HANDLE);
    if (start->device != stop->device) return told(INVALID_HANDLE);
    *milliseconds = std::chrono::duration<float, std::milli>(stop->at - start->at).count();
    return SUCCESS;
}
