/* Opening and closing spans without the cost of doing it in Python: the same as probes/_span.py, where each step is explained.

   A span is open on a thread from enter() to leave(), or over many steps, each from begin() or resume() to suspend(), pause() or
   finish(). Its rows go to the bytearrays of the recorder, which writes them to the spool. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BLOCK (1 << 16)
#define ROOM (2 * BLOCK)
#define MOST_HELD (1 << 22)
#define FIRST_AREA 4096
#define AREA (1 << 17)
#define SHIFT 20
#define OUTPUT 1
#define NO_BASE UINT64_MAX
#define MUTED ((uint64_t)1 << 63)

enum { SPAN_ROWS, SEEN_ROWS, ATTRIBUTE_ROWS, FILES };
enum { NAME, SITE, LOOKS, BEFORE, OUTPUTS, AFTER, COPIES, PLAN_FIELDS };

typedef struct {
    PyObject_HEAD uint64_t ident, current, base;
    char busy, copying;
    PyObject *pending;
} State;

typedef struct {
    PyObject_HEAD uint64_t id, parent, around, previous, outer_base, thread, entered, started, payload;
    uint32_t attributes;
    char running, done, deeper, copying;
    PyObject *plan, *mark;
} Span;

typedef struct {
    PyObject_HEAD PyObject *plan, *inner, *args, *kwargs;
    uint64_t parent;
} Unstarted;

/* numpy's PyArrayInterface, https://numpy.org/doc/stable/reference/arrays.interface.html */
typedef struct {
    int two, nd;
    char typekind;
    int itemsize, flags;
    Py_ssize_t *shape, *strides;
    void *data;
    PyObject *descr;
} Interface;

/* The same where numpy keeps it, as what is compiled against its C API reads it. To ask for the interface would allocate. */
typedef struct {
    PyObject_HEAD PyTypeObject *scalar;
    char letters[4];
    int number;
    uint64_t flags;
    Py_ssize_t itemsize;
} Descr;
typedef struct {
    PyObject_HEAD void *data;
    int nd;
    Py_ssize_t *shape, *strides;
    PyObject *base;
    Descr *descr;
} Array;

static PyTypeObject State_Type, Span_Type, Unstarted_Type;
static PyObject *parent_span, *span_rows, *seen_rows, *python_extents, *wrappers, *flush, *failed;
static PyTypeObject *ndarray;
static int has_fields; /* of Array */
static PyObject *current_mark;
static uint64_t (*take_mark)(uint64_t span); /* what current_mark does, where that is the hook's */
static PyObject *state_key, *name_struct, *name_data, *name_throw, *name_close, *name_pop;
static uint64_t last_span;
static uint64_t every = 1, outermost, muted_before = UINT64_MAX; /* see set_sampling */
static Py_buffer pending;

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- the calling thread -------------------------------------------------------------------------------------------------- */

static State *thread_state(void) {
    static _Thread_local struct {
        State *state;
        uint64_t thread;
    } cache;
    uint64_t id = PyThreadState_GetID(PyThreadState_Get());
    if (cache.state && cache.thread == id)
        return cache.state;
    PyObject *dict = PyThreadState_GetDict();
    if (!dict) {
        PyErr_SetString(PyExc_RuntimeError, "copytrace: this thread has no state");
        return NULL;
    }
    State *state = (State *)PyDict_GetItemWithError(dict, state_key);
    if (!state) {
        if (PyErr_Occurred() || !(state = PyObject_New(State, &State_Type)))
            return NULL;
        state->ident = PyThread_get_thread_ident();
        state->current = 0;
        state->base = NO_BASE;
        state->busy = state->copying = 0;
        state->pending = PyList_New(0);
        int error = !state->pending || PyDict_SetItem(dict, state_key, (PyObject *)state);
        Py_DECREF(state);
        if (error)
            return NULL;
    }
    cache.state = state;
    cache.thread = id;
    return state;
}

static void State_dealloc(State *self) {
    Py_XDECREF(self->pending);
    PyObject_Free(self);
}

static PyObject *State_get_base(State *self, void *unused) {
    (void)unused;
    if (self->base == NO_BASE)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(self->base);
}

static int State_set_base(State *self, PyObject *value, void *unused) {
    (void)unused;
    if (value != Py_None) {
        PyErr_SetString(PyExc_TypeError, "base: only None can be set");
        return -1;
    }
    self->base = NO_BASE;
    return 0;
}

static PyMemberDef State_members[] = {
    {"ident", Py_T_ULONGLONG, offsetof(State, ident), Py_READONLY, NULL},
    {"current", Py_T_ULONGLONG, offsetof(State, current), 0, NULL},
    {"busy", Py_T_BOOL, offsetof(State, busy), 0, NULL},
    {"copying", Py_T_BOOL, offsetof(State, copying), 0, NULL},
    {"pending", Py_T_OBJECT_EX, offsetof(State, pending), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef State_getset[] = {
    {"base", (getter)State_get_base, (setter)State_set_base, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject State_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "copytrace._spans.ThreadState",
    .tp_basicsize = sizeof(State),
    .tp_dealloc = (destructor)State_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "What is known of one thread: its innermost open span and, during a step of a coroutine, the one beneath it.",
    .tp_members = State_members,
    .tp_getset = State_getset,
};

static PyObject *state(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_XNewRef((PyObject *)thread_state());
}

/* --- rows ---------------------------------------------------------------------------------------------------------------- */

/* Puts bytes that follow `held` others into the area of a file in the mapped memory, see pending.py. */
static void mirror(int file, uint64_t written, Py_ssize_t held, const char *bytes, Py_ssize_t size) {
    uint64_t *words = pending.buf;
    if (held + size > AREA)
        return;
    memcpy((char *)pending.buf + FIRST_AREA + file * AREA + held, bytes, (size_t)size);
    __atomic_store_n(&words[file], written << SHIFT | (uint64_t)(held + size), __ATOMIC_RELEASE);
}

/* How many bytes it can hold where it is. */
static Py_ssize_t room_of(PyObject *rows) {
    PyByteArrayObject *of = (PyByteArrayObject *)rows;
    return of->ob_bytes ? of->ob_alloc - (of->ob_start - of->ob_bytes) - 1 : 0;
}

/* Not built into others: by its name a block is known for our own, see stacks.py. */
__attribute__((noinline)) static int append_to(PyObject *rows, int file, const char *row, Py_ssize_t size) {
    Py_ssize_t length = PyByteArray_GET_SIZE(rows);
    if (length >= MOST_HELD)
        return 0;
    if (room_of(rows) < length + size ? PyByteArray_Resize(rows, length + size) : 0)
        return -1;
    Py_SET_SIZE(rows, length + size);
    char *end = PyByteArray_AS_STRING(rows) + length;
    memcpy(end, row, (size_t)size);
    end[size] = 0;
    if (pending.obj)
        mirror(file, ((uint64_t *)pending.buf)[file] >> SHIFT, length, row, size);
    return 0;
}

static int append(int file, const char *row, Py_ssize_t size) {
    return append_to(file == SPAN_ROWS ? span_rows : seen_rows, file, row, size);
}

static char *put(char *at, uint64_t value, size_t size) {
    memcpy(at, &value, size);
    return at + size;
}

static int write_seen(uint64_t span, int role, int contiguous, uint64_t address, uint64_t extent, uint64_t nbytes) {
    char row[34], *at = put(row, span, 8);
    *at++ = (char)role;
    *at++ = (char)contiguous;
    at = put(put(put(at, address, 8), extent, 8), nbytes, 8);
    return append(SEEN_ROWS, row, at - row);
}

/* Where an array's data lies; `capsule` is to be released. NULL for an error. */
static Interface *interface_of(PyObject *array, Interface *fields, PyObject **capsule) {
    *capsule = NULL;
    if (has_fields) {
        Array *of = (Array *)array;
        *fields = (Interface){
            .nd = of->nd, .itemsize = (int)of->descr->itemsize, .shape = of->shape, .strides = of->strides, .data = of->data};
        return fields;
    }
    *capsule = PyObject_GetAttr(array, name_struct);
    return *capsule ? PyCapsule_GetPointer(*capsule, NULL) : NULL;
}

/* Compares both ways for an array; 1 when they agree, -1 for an error. */
static int agree(PyObject *array) {
    if (ndarray->tp_basicsize < (Py_ssize_t)sizeof(Array) ||
        Py_TYPE(((Array *)array)->descr)->tp_basicsize < (Py_ssize_t)sizeof(Descr))
        return 0;
    Interface fields;
    PyObject *capsule;
    has_fields = 1;
    Interface ours = *interface_of(array, &fields, &capsule);
    has_fields = 0;
    Interface *theirs = interface_of(array, &fields, &capsule);
    size_t axes = theirs ? (size_t)theirs->nd * sizeof *theirs->shape : 0;
    int same = theirs && ours.data == theirs->data && ours.nd == theirs->nd && ours.itemsize == theirs->itemsize &&
               !memcmp(ours.shape, theirs->shape, axes) && !memcmp(ours.strides, theirs->strides, axes);
    Py_XDECREF(capsule);
    return theirs ? same : -1;
}

static int see_array(uint64_t span, int role, PyObject *array) {
    Interface fields;
    PyObject *capsule;
    Interface *found = interface_of(array, &fields, &capsule);
    if (!found) {
        Py_XDECREF(capsule);
        return -1;
    }
    int64_t size = found->itemsize, dense = found->itemsize, low = 0, high = 0;
    for (int axis = 0; axis < found->nd; axis++) {
        size *= found->shape[axis];
        int64_t reach = (found->shape[axis] - 1) * found->strides[axis];
        *(reach < 0 ? &low : &high) += reach;
    }
    int64_t extent = high - low + dense;
    uint64_t address = (uint64_t)(uintptr_t)found->data + (uint64_t)low;
    Py_XDECREF(capsule);
    return size ? write_seen(span, role, extent == size, address, (uint64_t)extent, (uint64_t)size) : 0;
}

static int see_slowly(uint64_t span, int role, PyObject *value) {
    PyObject *extents = PyObject_CallOneArg(python_extents, value);
    int error = extents ? 0 : -1;
    for (Py_ssize_t i = 0; !error && i < PyTuple_GET_SIZE(extents); i++) {
        int contiguous;
        unsigned long long address, extent, nbytes;
        error = !PyArg_ParseTuple(PyTuple_GET_ITEM(extents, i), "iKKK", &contiguous, &address, &extent, &nbytes) ||
                write_seen(span, role, contiguous, address, extent, nbytes);
    }
    Py_XDECREF(extents);
    return error ? -1 : 0;
}

static int see_value(uint64_t span, int role, PyObject *value) {
    if (value == Py_None)
        return 0;
    if (PyBytes_CheckExact(value)) {
        uint64_t size = (uint64_t)PyBytes_GET_SIZE(value);
        return size ? write_seen(span, role, 1, (uint64_t)(uintptr_t)PyBytes_AS_STRING(value), size, size) : 0;
    }
    if (Py_IS_TYPE(value, ndarray))
        return see_array(span, role, value);
    if (PyDict_Contains(wrappers, (PyObject *)Py_TYPE(value)) == 1) {
        PyObject *data = PyObject_GetAttr(value, name_data);
        int error = data ? (Py_IS_TYPE(data, ndarray) ? see_array : see_slowly)(span, role, data) : -1;
        Py_XDECREF(data);
        return error;
    }
    return see_slowly(span, role, value);
}

static PyObject *see(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "see(span, role, value)");
        return NULL;
    }
    uint64_t span = PyLong_AsUnsignedLongLong(args[0]);
    long role = PyLong_AsLong(args[1]);
    if (PyErr_Occurred() || see_value(span, (int)role, args[2]))
        return NULL;
    Py_RETURN_NONE;
}

/* Errors of a probe's own go to the recorder, which raises them again in tests only. */
static int contain(PyObject *plan) {
    PyObject *error = PyErr_GetRaisedException();
    if (!PyObject_TypeCheck(error, (PyTypeObject *)PyExc_Exception)) {
        PyErr_SetRaisedException(error);
        return -1;
    }
    PyObject *done = PyObject_CallFunctionObjArgs(failed, error, PyTuple_GET_ITEM(plan, NAME), NULL);
    Py_DECREF(error);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* --- spans --------------------------------------------------------------------------------------------------------------- */

static int get_parent(uint64_t *span) {
    PyObject *value;
    if (PyContextVar_Get(parent_span, NULL, &value))
        return -1;
    *span = value ? PyLong_AsUnsignedLongLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int set_parent(uint64_t span) {
    PyObject *value = PyLong_FromUnsignedLongLong(span);
    PyObject *token = value ? PyContextVar_Set(parent_span, value) : NULL;
    Py_XDECREF(value);
    Py_XDECREF(token);
    return token ? 0 : -1;
}

/* Tells the mark of this span's recording that `span` is innermost now; 0 when that recording is over. */
static int tell(Span *self, uint64_t span, uint64_t *sequence) {
    *sequence = 0;
    if (!self->mark || self->mark != current_mark)
        return 0;
    if (take_mark) {
        *sequence = take_mark(span);
        return 0;
    }
    PyObject *argument = PyLong_FromUnsignedLongLong(span);
    PyObject *number = argument ? PyObject_CallOneArg(self->mark, argument) : NULL;
    Py_XDECREF(argument);
    if (!number)
        return -1;
    *sequence = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static void become_innermost(Span *self, State *state) {
    if (self->id < MUTED)
        state->current = self->id;
}

static int look_before(Span *self, PyObject *args, PyObject *kwargs) {
    PyObject *looks = PyTuple_GET_ITEM(self->plan, LOOKS), *before = PyTuple_GET_ITEM(self->plan, BEFORE);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(looks); i++) {
        PyObject *look = PyTuple_GET_ITEM(looks, i), *value = NULL;
        long role = PyLong_AsLong(PyTuple_GET_ITEM(look, 0));
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(look, 1));
        if (index < PyTuple_GET_SIZE(args))
            value = PyTuple_GET_ITEM(args, index);
        else
            value = PyDict_GetItemWithError(kwargs, PyTuple_GET_ITEM(look, 2));
        if (value && see_value(self->id, (int)role, value) && contain(self->plan))
            return -1;
    }
    if (before == Py_None)
        return 0;
    PyObject *id = PyLong_FromUnsignedLongLong(self->id);
    PyObject *found = id ? PyObject_CallFunctionObjArgs(before, id, args, kwargs, NULL) : NULL;
    unsigned long long payload;
    unsigned int attributes;
    int error = !found || !PyArg_ParseTuple(found, "IK", &attributes, &payload);
    if (!error) {
        self->attributes = attributes;
        self->payload = payload;
    }
    Py_XDECREF(id);
    Py_XDECREF(found);
    return error ? -1 : 0;
}

/* Whether a call beneath `above` is left out: one that is not sampled, or what such a one calls. */
static int left_out(PyObject *plan, uint64_t above) {
    if (above)
        return above > muted_before;
    return every > 1 && PyTuple_GET_ITEM(plan, COPIES) != Py_True && outermost++ % every;
}

static Span *open_span(State *state, PyObject *plan, PyObject *args, PyObject *kwargs, uint64_t parent) {
    if (!PyTuple_Check(plan) || PyTuple_GET_SIZE(plan) != PLAN_FIELDS || !PyTuple_Check(args) || !PyDict_Check(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a Plan, a tuple and a dict are needed");
        return NULL;
    }
    Span *self = PyObject_New(Span, &Span_Type);
    if (!self)
        return NULL;
    memset((char *)self + offsetof(Span, id), 0, sizeof(Span) - offsetof(Span, id));
    self->plan = Py_NewRef(plan);
    self->id = ++last_span;
    self->thread = state->ident;
    if (get_parent(&self->around)) {
        Py_DECREF(self);
        return NULL;
    }
    self->parent = self->around ? self->around : parent;
    if (left_out(plan, self->parent))
        self->id |= MUTED;
    else
        self->mark = Py_XNewRef(current_mark);
    if (self->mark && look_before(self, args, kwargs)) {
        Py_DECREF(self);
        return NULL;
    }
    self->previous = state->current;
    self->started = now();
    if (tell(self, self->id, &self->entered) || set_parent(self->id)) {
        Py_DECREF(self);
        return NULL;
    }
    become_innermost(self, state);
    return self;
}

static int write_span(Span *self, uint64_t left, int error) {
    if (!left)
        return 0;
    char row[73], *at = put(put(row, self->id, 8), self->parent, 8);
    at = put(put(at, PyLong_AsUnsignedLong(PyTuple_GET_ITEM(self->plan, SITE)), 4), self->attributes, 4);
    at = put(put(put(at, self->thread, 8), self->entered, 8), left, 8);
    at = put(put(put(at, self->started, 8), now(), 8), self->payload, 8);
    *at++ = error != 0;
    if (append(SPAN_ROWS, row, at - row))
        return -1;
    if (PyByteArray_GET_SIZE(span_rows) <= BLOCK && PyByteArray_GET_SIZE(seen_rows) <= BLOCK)
        return 0;
    PyObject *done = PyObject_CallNoArgs(flush);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static void Span_dealloc(Span *self) {
    Py_XDECREF(self->plan);
    Py_XDECREF(self->mark);
    PyObject_Free(self);
}

static PyObject *enter(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    State *state = thread_state();
    if (!state)
        return NULL;
    if (!current_mark || state->busy)
        Py_RETURN_NONE;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "enter(plan, args, kwargs)");
        return NULL;
    }
    Span *self = open_span(state, args[0], args[1], args[2], 0);
    if (self) {
        self->copying = state->copying;
        state->copying = PyTuple_GET_ITEM(self->plan, COPIES) == Py_True;
    }
    return (PyObject *)self;
}

static Span *begin_span(PyObject *plan, PyObject *args, PyObject *kwargs, uint64_t parent) {
    State *state = thread_state();
    uint64_t beneath = state ? state->current : 0;
    Span *self = state ? open_span(state, plan, args, kwargs, parent) : NULL;
    if (self) {
        self->running = 1;
        self->outer_base = state->base;
        if (state->base == NO_BASE)
            state->base = beneath;
    }
    return self;
}

static PyObject *begin(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "begin(plan, args, kwargs)");
        return NULL;
    }
    State *state = thread_state();
    if (!state)
        return NULL;
    if (!current_mark || state->busy)
        Py_RETURN_NONE;
    return (PyObject *)begin_span(args[0], args[1], args[2], 0);
}

static PyObject *Span_leave(Span *self, PyObject *error) {
    State *state = thread_state();
    uint64_t left;
    if (!state || set_parent(self->around))
        return NULL;
    state->current = self->previous;
    state->copying = self->copying;
    if (tell(self, self->previous, &left) || write_span(self, left, error == Py_True))
        return NULL;
    Py_RETURN_NONE;
}

static int resume(Span *self) {
    State *state = thread_state();
    uint64_t sequence;
    if (self->running)
        return 0;
    if (!state || get_parent(&self->around))
        return -1;
    self->running = 1;
    self->previous = state->current;
    self->outer_base = state->base;
    if (state->base == NO_BASE)
        state->base = state->current;
    if (!self->deeper && tell(self, self->id, &sequence))
        return -1;
    become_innermost(self, state);
    return set_parent(self->id);
}

static int leave_step(Span *self, State *state) {
    self->running = 0;
    state->base = self->outer_base;
    return set_parent(self->around);
}

static int suspend(Span *self) {
    State *state = thread_state();
    uint64_t sequence;
    if (!state)
        return -1;
    uint64_t beneath = state->base == NO_BASE ? 0 : state->base;
    self->deeper = state->current == beneath;
    if (!self->deeper) {
        state->current = beneath;
        if (tell(self, beneath, &sequence))
            return -1;
    }
    return leave_step(self, state);
}

static int pause_step(Span *self) {
    State *state = thread_state();
    uint64_t sequence;
    if (!state)
        return -1;
    state->current = self->previous;
    self->deeper = 0;
    return tell(self, self->previous, &sequence) || leave_step(self, state) ? -1 : 0;
}

static int finish(Span *self, int error) {
    State *state = thread_state();
    uint64_t left;
    if (!state)
        return -1;
    state->current = self->previous;
    self->done = 1;
    return tell(self, self->previous, &left) || leave_step(self, state) || write_span(self, left, error) ? -1 : 0;
}

static PyObject *none_unless(int error) {
    if (error)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Span_resume(Span *self, PyObject *unused) {
    (void)unused;
    return none_unless(resume(self));
}

static PyObject *Span_suspend(Span *self, PyObject *unused) {
    (void)unused;
    return none_unless(suspend(self));
}

static PyObject *Span_pause(Span *self, PyObject *unused) {
    (void)unused;
    return none_unless(pause_step(self));
}

static PyObject *Span_finish(Span *self, PyObject *error) {
    return none_unless(finish(self, error == Py_True));
}

static PyObject *Span_finish_elsewhere(Span *self, PyObject *error) {
    State *state = thread_state();
    uint64_t left;
    if (!state || tell(self, state->current, &left) || write_span(self, left, error == Py_True))
        return NULL;
    Py_RETURN_NONE;
}

static int look_after(Span *self, PyObject *result) {
    PyObject *after = PyTuple_GET_ITEM(self->plan, AFTER);
    if (PyTuple_GET_ITEM(self->plan, OUTPUTS) == Py_True && see_value(self->id, OUTPUT, result) && contain(self->plan))
        return -1;
    if (after == Py_None)
        return 0;
    PyObject *done = PyObject_CallOneArg(after, result);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *Span_result(Span *self, PyObject *result) {
    return none_unless(look_after(self, result));
}

/* What a step of a coroutine came to: it waits for `result`, returned it, or raised. */
static PyObject *stepped(Span *self, PySendResult how, PyObject *result) {
    if (how == PYGEN_NEXT) {
        if (suspend(self))
            Py_CLEAR(result);
        return result;
    }
    if (how == PYGEN_ERROR) {
        PyObject *error = PyErr_GetRaisedException();
        if (finish(self, 1))
            Py_DECREF(error);
        else
            PyErr_SetRaisedException(error);
        return NULL;
    }
    PyObject *stop = finish(self, 0) || look_after(self, result) ? NULL : PyObject_CallOneArg(PyExc_StopIteration, result);
    if (stop)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_DECREF(result);
    return NULL;
}

static PyObject *Span_send(Span *self, PyObject *const *args, Py_ssize_t count) {
    PyObject *result;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "send(coroutine, value)");
        return NULL;
    }
    if (resume(self))
        return NULL;
    PySendResult how = PyIter_Send(args[0], args[1], &result);
    return stepped(self, how, result);
}

static PyObject *Span_throw(Span *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "throw(coroutine, [exception])");
        return NULL;
    }
    if (resume(self))
        return NULL;
    PyObject *error = PyObject_CallMethodNoArgs(args[1], name_pop);
    PyObject *result = error ? PyObject_CallMethodOneArg(args[0], name_throw, error) : NULL;
    Py_XDECREF(error);
    if (result)
        return stepped(self, PYGEN_NEXT, result);
    if (!PyErr_ExceptionMatches(PyExc_StopIteration))
        return stepped(self, PYGEN_ERROR, NULL);
    PyObject *stop = PyErr_GetRaisedException();
    result = Py_NewRef(((PyStopIterationObject *)stop)->value);
    Py_DECREF(stop);
    return stepped(self, PYGEN_RETURN, result);
}

static PyMethodDef Span_methods[] = {
    {"leave", (PyCFunction)Span_leave, METH_O, "leave(error): a call that was entered is over"},
    {"send", (PyCFunction)(void (*)(void))Span_send, METH_FASTCALL, "send(coroutine, value): take the coroutine one step on"},
    {"throw", (PyCFunction)(void (*)(void))Span_throw, METH_FASTCALL, "throw(coroutine, [exception]): the same by the exception, which is taken out"},
    {"resume", (PyCFunction)Span_resume, METH_NOARGS, "resume(): a step begins on this thread"},
    {"suspend", (PyCFunction)Span_suspend, METH_NOARGS, "suspend(): the step ends by waiting"},
    {"pause", (PyCFunction)Span_pause, METH_NOARGS, "pause(): the step ends and its caller goes on"},
    {"finish", (PyCFunction)Span_finish, METH_O, "finish(error): the last step ends"},
    {"finish_elsewhere", (PyCFunction)Span_finish_elsewhere, METH_O, "finish_elsewhere(error): it is over, outside of any step"},
    {"result", (PyCFunction)Span_result, METH_O, "result(value): look at what came out"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Span_members[] = {
    {"id", Py_T_ULONGLONG, offsetof(Span, id), Py_READONLY, NULL},
    {"running", Py_T_BOOL, offsetof(Span, running), Py_READONLY, NULL},
    {"done", Py_T_BOOL, offsetof(Span, done), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Span_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "copytrace._spans.Span",
    .tp_basicsize = sizeof(Span),
    .tp_dealloc = (destructor)Span_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "One call at a site, from its first step to its last.",
    .tp_methods = Span_methods,
    .tp_members = Span_members,
};

/* --- coroutines and generators before their first step -------------------------------------------------------------------- */

static PyObject *Unstarted_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *plan, *inner, *of_call, *names;
    uint64_t parent;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Unstarted takes no names");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOO!O!", &plan, &inner, &PyTuple_Type, &of_call, &PyDict_Type, &names) || get_parent(&parent))
        return NULL;
    Unstarted *self = (Unstarted *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->plan = Py_NewRef(plan);
    self->inner = Py_NewRef(inner);
    self->args = Py_NewRef(of_call);
    self->kwargs = Py_NewRef(names);
    self->parent = parent;
    return (PyObject *)self;
}

static PyObject *Unstarted_start(Unstarted *self, PyObject *unused) {
    (void)unused;
    if (!self->inner) {
        PyErr_SetString(PyExc_RuntimeError, "it was started already");
        return NULL;
    }
    Span *span = begin_span(self->plan, self->args, self->kwargs, self->parent);
    if (!span)
        return NULL;
    Py_CLEAR(self->args);
    Py_CLEAR(self->kwargs);
    PyObject *both = PyTuple_New(2);
    if (!both) {
        Py_DECREF(span);
        return NULL;
    }
    PyTuple_SET_ITEM(both, 0, self->inner);
    PyTuple_SET_ITEM(both, 1, (PyObject *)span);
    self->inner = NULL;
    return both;
}

static int Unstarted_traverse(Unstarted *self, visitproc visit, void *arg) {
    Py_VISIT(self->plan);
    Py_VISIT(self->inner);
    Py_VISIT(self->args);
    Py_VISIT(self->kwargs);
    return 0;
}

static int Unstarted_clear(Unstarted *self) {
    Py_CLEAR(self->plan);
    Py_CLEAR(self->inner);
    Py_CLEAR(self->args);
    Py_CLEAR(self->kwargs);
    return 0;
}

static void Unstarted_finalize(PyObject *object) {
    Unstarted *self = (Unstarted *)object;
    if (!self->inner || !PyCoro_CheckExact(self->inner))
        return;
    PyObject *error = PyErr_GetRaisedException();
    PyObject *closed = PyObject_CallMethodNoArgs(self->inner, name_close);
    if (!closed)
        PyErr_WriteUnraisable(object);
    Py_XDECREF(closed);
    PyErr_SetRaisedException(error);
}

static void Unstarted_dealloc(Unstarted *self) {
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self))
        return;
    PyObject_GC_UnTrack(self);
    Unstarted_clear(self);
    PyObject_GC_Del(self);
}

static PyMethodDef Unstarted_methods[] = {
    {"start", (PyCFunction)Unstarted_start, METH_NOARGS, "start() -> the coroutine or generator and its Span, in its first step"},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject Unstarted_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "copytrace._spans.Unstarted",
    .tp_basicsize = sizeof(Unstarted),
    .tp_dealloc = (destructor)Unstarted_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Unstarted(plan, inner, args, kwargs): a coroutine or generator until its first step; closes one that never had it.",
    .tp_traverse = (traverseproc)Unstarted_traverse,
    .tp_clear = (inquiry)Unstarted_clear,
    .tp_finalize = Unstarted_finalize,
    .tp_methods = Unstarted_methods,
    .tp_new = Unstarted_new,
};

/* --- the module ---------------------------------------------------------------------------------------------------------- */

static PyObject *set_mark(PyObject *module, PyObject *mark) {
    (void)module;
    PyObject *of = PyCFunction_Check(mark) ? PyCFunction_GET_SELF(mark) : NULL;
    PyObject *own = of ? PyObject_GetAttrString(of, "mark") : NULL;
    PyObject *directly = own == mark ? PyObject_GetAttrString(of, "take_mark") : NULL;
    take_mark = directly ? (uint64_t (*)(uint64_t))PyCapsule_GetPointer(directly, "copytrace._transfers.take_mark") : NULL;
    PyErr_Clear(); /* another mark is called as any function is */
    Py_XDECREF(own);
    Py_XDECREF(directly);
    Py_XSETREF(current_mark, mark == Py_None ? NULL : Py_NewRef(mark));
    Py_RETURN_NONE;
}

static PyObject *set_pending(PyObject *module, PyObject *memory) {
    (void)module;
    PyBuffer_Release(&pending);
    if (memory == Py_None)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(memory, &pending, PyBUF_WRITABLE))
        return NULL;
    if (pending.len < FIRST_AREA + FILES * AREA) {
        PyBuffer_Release(&pending);
        PyErr_SetString(PyExc_ValueError, "the memory is too small");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* In these two no signal handler and no other thread comes between. */

static PyObject *add(PyObject *module, PyObject *args) {
    (void)module;
    int file;
    PyObject *rows;
    const char *row;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "iO!y#", &file, &PyByteArray_Type, &rows, &row, &size))
        return NULL;
    if (file < 0 || file >= FILES) {
        PyErr_SetString(PyExc_ValueError, "add(file, rows, row)");
        return NULL;
    }
    return none_unless(append_to(rows, file, row, size));
}

static PyObject *settle(PyObject *module, PyObject *args) {
    (void)module;
    int file;
    Py_ssize_t count;
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "iO!n", &file, &PyByteArray_Type, &rows, &count))
        return NULL;
    Py_ssize_t rest = PyByteArray_GET_SIZE(rows) - count;
    if (!pending.obj || file < 0 || file >= FILES || count < 0 || rest < 0) {
        PyErr_SetString(PyExc_ValueError, "settle(file, rows, count)");
        return NULL;
    }
    char *bytes = PyByteArray_AS_STRING(rows);
    memmove(bytes, bytes + count, (size_t)rest);
    mirror(file, (((uint64_t *)pending.buf)[file] >> SHIFT) + (uint64_t)count, 0, bytes, rest < AREA ? rest : AREA);
    Py_SET_SIZE(rows, rest);
    Py_RETURN_NONE;
}

static char *quote(char *at, char *end, PyObject *text) {
    if (!at || !PyUnicode_Check(text) || !PyUnicode_IS_COMPACT_ASCII(text) || end - at < PyUnicode_GET_LENGTH(text) + 2)
        return NULL;
    const char *from = PyUnicode_DATA(text);
    *at++ = '"';
    for (Py_ssize_t left = PyUnicode_GET_LENGTH(text); left; left--, from++) {
        if (*from < ' ' || *from > '~' || *from == '"' || *from == '\\')
            return NULL;
        *at++ = *from;
    }
    *at++ = '"';
    return at;
}

static char *say(char *at, const char *text) {
    return at ? (char *)memcpy(at, text, strlen(text)) + strlen(text) : NULL;
}

/* The line that Recorder.request describes, without the cost of making it in Python. */
static PyObject *request(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyByteArray_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "request(rows, key, store)");
        return NULL;
    }
    char line[512], *end = line + sizeof line - 16, *at = say(line, "{\"key\": ");
    at = say(quote(at, end, args[1]), ", \"store\": ");
    at = say(quote(at, end, args[2]), "}\n");
    if (!at || PyByteArray_GET_SIZE(args[0]) >= MOST_HELD)
        Py_RETURN_FALSE;
    if (append_to(args[0], ATTRIBUTE_ROWS, line, at - line))
        return NULL;
    Py_RETURN_TRUE;
}

/* What grows in a span of the user's would be taken for a block of the user's. */
static PyObject *reserve(PyObject *module, PyObject *rows) {
    (void)module;
    if (!PyByteArray_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "reserve(rows): not a bytearray");
        return NULL;
    }
    Py_ssize_t held = PyByteArray_GET_SIZE(rows);
    if (room_of(rows) < ROOM && PyByteArray_Resize(rows, ROOM))
        return NULL;
    Py_SET_SIZE(rows, held);
    Py_RETURN_NONE;
}

/* Neither allocates nor lets the hooks see it: what is written is no copy of the user's. Only one at a time. */
static PyObject *write_some(PyObject *module, PyObject *args) {
    (void)module;
    static char block[BLOCK];
    int descriptor;
    Py_ssize_t start;
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "iO!n", &descriptor, &PyByteArray_Type, &rows, &start))
        return NULL;
    Py_ssize_t left = PyByteArray_GET_SIZE(rows) - start;
    if (start < 0 || left < 0) {
        PyErr_SetString(PyExc_ValueError, "write_some(descriptor, rows, start)");
        return NULL;
    }
    size_t size = (size_t)(left < BLOCK ? left : BLOCK);
    memcpy(block, PyByteArray_AS_STRING(rows) + start, size);
    for (;;) {
        ssize_t written;
        Py_BEGIN_ALLOW_THREADS
        written = write(descriptor, block, size);
        Py_END_ALLOW_THREADS
        if (written >= 0)
            return PyLong_FromSsize_t(written);
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals())
            return NULL;
    }
}

static PyObject *next_span(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong(++last_span);
}

static PyObject *setup(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *of[7];
    PyObject *array;
    if (!PyArg_ParseTuple(args, "OO!O!OO!OOO", &of[0], &PyByteArray_Type, &of[1], &PyByteArray_Type, &of[2], &of[3], &PyDict_Type,
                          &of[4], &of[5], &of[6], &array))
        return NULL;
    PyObject **places[] = {&parent_span, &span_rows, &seen_rows, &python_extents, &wrappers, &flush, &failed};
    for (size_t i = 0; i < 7; i++)
        Py_XSETREF(*places[i], Py_NewRef(of[i]));
    Py_XSETREF(ndarray, (PyTypeObject *)Py_NewRef(Py_TYPE(array)));
    has_fields = agree(array);
    return none_unless(has_fields < 0);
}

/* What an earlier session left out is not left out of this one: its ids are at most `muted_before`. */
static PyObject *set_sampling(PyObject *module, PyObject *number) {
    (void)module;
    uint64_t wanted = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (!wanted) {
        PyErr_SetString(PyExc_ValueError, "every: from 1 up");
        return NULL;
    }
    every = wanted;
    outermost = 0;
    muted_before = MUTED | last_span;
    Py_RETURN_NONE;
}

static PyObject *outermost_calls(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong(outermost);
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(parent_span, spans, seen, extents, wrappers, flush, failed, array): one of the type to look at itself"},
    {"set_mark", set_mark, METH_O, "set_mark(mark or None): record with it, or not at all"},
    {"set_sampling", set_sampling, METH_O, "set_sampling(every): record that one of so many outermost calls, from now on"},
    {"outermost", outermost_calls, METH_NOARGS, "outermost() -> how many there were since"},
    {"set_pending", set_pending, METH_O, "set_pending(memory or None): mirror rows in it, see pending.py"},
    {"add", add, METH_VARARGS, "add(file, rows, row): append a row and mirror it"},
    {"request", (PyCFunction)(void (*)(void))request, METH_FASTCALL,
     "request(rows, key, store) -> whether its line was added to rows; one that is long or needs escapes is not"},
    {"reserve", reserve, METH_O, "reserve(rows): make room in an empty one for what is held until it is written"},
    {"write_some", write_some, METH_VARARGS, "write_some(descriptor, rows, start) -> how many bytes of rows were written"},
    {"settle", settle, METH_VARARGS, "settle(file, rows, count): the first count bytes of rows were written"},
    {"state", state, METH_NOARGS, "state() -> the calling thread's ThreadState"},
    {"next_span", next_span, METH_NOARGS, "next_span() -> an id that was never given before"},
    {"see", (PyCFunction)(void (*)(void))see, METH_FASTCALL, "see(span, role, value): note where the bytes of value lie"},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, "begin(plan, args, kwargs) -> a Span in its first step, or None"},
    {"enter", (PyCFunction)(void (*)(void))enter, METH_FASTCALL, "enter(plan, args, kwargs) -> an open Span, or None when not recording"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_spans", "Opens and closes spans.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__spans(void) {
    PyObject *module = PyModule_Create(&definition);
    state_key = PyUnicode_InternFromString("copytrace");
    name_struct = PyUnicode_InternFromString("__array_struct__");
    name_data = PyUnicode_InternFromString("_data");
    name_throw = PyUnicode_InternFromString("throw");
    name_close = PyUnicode_InternFromString("close");
    name_pop = PyUnicode_InternFromString("pop");
    if (!module || !state_key || !name_struct || !name_data || !name_throw || !name_close || !name_pop || PyType_Ready(&State_Type) ||
        PyType_Ready(&Unstarted_Type) || PyModule_AddObjectRef(module, "Unstarted", (PyObject *)&Unstarted_Type) ||
        PyModule_AddObjectRef(module, "ThreadState", (PyObject *)&State_Type) || PyType_Ready(&Span_Type) ||
        PyModule_AddObjectRef(module, "Span", (PyObject *)&Span_Type)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
