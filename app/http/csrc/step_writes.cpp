// Send the frames of one engine step to its streams. The event loop adds each frame between `begin` and `end`. A helper
// thread sends frames while the loop adds more, so that the kernel's `send` overlaps with Python's work on the next
// frame. `end` sends the remaining frames without the interpreter's lock, and returns the bytes that no socket took.
//
// 1. The event loop calls `begin` and `end` in one callback. So no descriptor is closed while a frame waits or is sent,
//    and its number cannot become the number of another connection.
// 2. A batch has at most one frame for a descriptor, so the frames of a stream keep their order.
// 3. No send waits for a client. After an error, `end` returns the frame, and the transport handles the error.
// 4. A process has one batch at a time. Until `end`, `begin` returns False to a second event loop.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <atomic>
#include <system_error>
#include <thread>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // Python ignores the signal anyway
#endif

namespace {

constexpr long ROOM = 4096;  // frames of a batch
constexpr long WORTH_HELP = 8;  // waiting frames; waking the helper costs as much as sending one frame
constexpr long WORTH_RELEASE = 4;  // frames; getting the lock back from a busy thread takes up to 0.5 ms

struct Frame {
  int descriptor;
  PyObject *transport, *data;
  Py_ssize_t sent;  // bytes
};

Frame frames[ROOM];  // a ring
unsigned long owner = 0;  // thread of the batch, or 0; the interpreter's lock guards it and the next two
long num_ended = 0;  // frames of earlier batches; like the counts below, since the process started
bool has_helper = false;
std::atomic<long> num_added{0}, num_taken{0}, num_done{0};
std::atomic<int> is_awake{0};  // 1 while the helper sends

// Send frames until none waits. Each frame is sent by one thread only.
void send_frames() {
  long number = num_taken.load();
  while (number < num_added.load(std::memory_order_acquire)) {
    if (!num_taken.compare_exchange_weak(number, number + 1)) continue;
    Frame& frame = frames[number % ROOM];
    frame.sent = send(frame.descriptor, PyBytes_AS_STRING(frame.data), PyBytes_GET_SIZE(frame.data),
                      MSG_DONTWAIT | MSG_NOSIGNAL);
    num_done.fetch_add(1, std::memory_order_release);
    number = num_taken.load();
  }
}

void help() {
  for (;;) {
    send_frames();
    is_awake = 0;
    is_awake.wait(0);
  }
}

void call_helper() {
  is_awake = 1;
  if (has_helper) return is_awake.notify_one();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the helper gets no signals
  try {
    std::thread(help).detach();  // the thread lives as long as the process
    has_helper = true;
  } catch (const std::system_error&) {  // the process may start no more threads; `end` sends all frames
    is_awake = 0;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

PyObject* begin(PyObject*, PyObject*) {
  if (owner != 0) Py_RETURN_FALSE;
  owner = PyThread_get_thread_ident();
  Py_RETURN_TRUE;
}

PyObject* add(PyObject*, PyObject* const* given, Py_ssize_t count) {
  const int descriptor = count == 3 && PyBytes_Check(given[2]) ? static_cast<int>(PyLong_AsLong(given[1])) : -1;
  if (descriptor < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "add takes a transport, its descriptor and bytes");
    return nullptr;
  }
  const long number = num_added.load(std::memory_order_relaxed);
  if (owner != PyThread_get_thread_ident() || number - num_ended == ROOM) Py_RETURN_FALSE;
  frames[number % ROOM] = {descriptor, Py_NewRef(given[0]), Py_NewRef(given[2]), 0};
  num_added.store(number + 1, std::memory_order_release);
  if (number + 1 - num_taken.load(std::memory_order_relaxed) >= WORTH_HELP && is_awake == 0) call_helper();
  Py_RETURN_TRUE;
}

PyObject* end(PyObject*, PyObject*) {
  const long all = num_added.load(std::memory_order_relaxed);
  PyThreadState* state = all - num_ended >= WORTH_RELEASE ? PyEval_SaveThread() : nullptr;
  send_frames();
  while (num_done.load(std::memory_order_acquire) != all) std::this_thread::yield();  // the helper still sends
  if (state != nullptr) PyEval_RestoreThread(state);
  PyObject* unsent = PyList_New(0);
  for (; num_ended < all; ++num_ended) {
    Frame& frame = frames[num_ended % ROOM];
    const Py_ssize_t sent = frame.sent > 0 ? frame.sent : 0, left = PyBytes_GET_SIZE(frame.data) - sent;
    if (left > 0 && unsent != nullptr) {
      PyObject* each = Py_BuildValue("(Oy#)", frame.transport, PyBytes_AS_STRING(frame.data) + sent, left);
      if (each == nullptr || PyList_Append(unsent, each) != 0) Py_CLEAR(unsent);
      Py_XDECREF(each);
    }
    Py_DECREF(frame.transport);
    Py_DECREF(frame.data);
  }
  owner = 0;
  return unsent;
}

PyMethodDef functions[] = {
    {"begin", begin, METH_NOARGS, "Begin a batch. Return False if another thread has one."},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL,
     "Add a frame for the descriptor of a transport. Return False if this thread has no batch, or a full one."},
    {"end", end, METH_NOARGS, "Send the batch. Return a list of (transport, bytes) that the sockets did not take."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_step_writes", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__step_writes() { return PyModule_Create(&module); }
