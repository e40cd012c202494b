/* The slots of the loaded objects that hold the address of a function we stand in for: found through the dynamic section of each
   object, under the loader's lock. An object is parsed once; what was learned of it is kept until the loader unloads something.

   Nothing is written that was not read first: a slot is patched when it holds the real function (or its own lazy stub), and put
   back when it still holds our hook. A read-only page is opened for the one store and closed again. */

#include "_transfers.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT, ABSOLUTE = R_X86_64_64 };
#else
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT, ABSOLUTE = R_AARCH64_ABS64 };
#endif

enum { MAX_OBJECTS = 1 << 13, MAX_SLOTS = 1 << 16, MAX_RANGES = 1 << 16 };

typedef _Atomic uintptr_t word;

struct slot {
    word *address;
    const struct call *call;
    uintptr_t original; /* what to put back; 0 while the slot is not ours */
};

struct object {
    uintptr_t base;
    const ElfW(Dyn) *dynamic;
    uint64_t name; /* hash of its path */
    size_t first_slot, slot_count;
};

/* What is loaded. Each patch builds the next table from this one; static, so that neither malloc nor memray hears of it. */
static struct table {
    size_t object_count, slot_count;
    struct object objects[MAX_OBJECTS];
    struct slot slots[MAX_SLOTS];
} tables[2], *table = &tables[0];

static unsigned long long adds_settled, adds_patched, subs_patched;
static size_t patched;

struct view {
    uintptr_t base, low, high; /* where its segments lie */
    const ElfW(Dyn) *dynamic;
    const ElfW(Sym) *symbols;
    const char *strings;
    const ElfW(Rela) *relocations[2];
    size_t counts[2];
};

static struct view libc_view, pthread_view; /* one library in a newer glibc */

static int inside(const struct view *view, uintptr_t address) {
    return address >= view->low && address < view->high;
}

/* --- protections ------------------------------------------------------------------------------------------------------- */

static struct range {
    uintptr_t start, end;
    int protection;
} ranges[MAX_RANGES];
static size_t range_count;

static uintptr_t parse_hex(const char **text) {
    uintptr_t value = 0;
    for (;; ++*text) {
        unsigned decimal = (unsigned char)**text - (unsigned)'0', letter = (unsigned char)**text - (unsigned)'a';
        if (decimal < 10)
            value = value << 4 | decimal;
        else if (letter < 6)
            value = value << 4 | (letter + 10);
        else
            return value;
    }
}

static void parse_range(const char *line) {
    struct range *range = &ranges[range_count++];
    range->start = parse_hex(&line);
    line++;
    range->end = parse_hex(&line);
    range->protection =
        (line[1] == 'r' ? PROT_READ : 0) | (line[2] == 'w' ? PROT_WRITE : 0) | (line[3] == 'x' ? PROT_EXEC : 0);
}

static void read_ranges(void) {
    static char buffer[1 << 15]; /* several of the longest lines */
    size_t filled = 0;
    range_count = 0;
    int descriptor = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    for (ssize_t got; descriptor >= 0 && (got = read(descriptor, buffer + filled, sizeof buffer - filled)) > 0;) {
        filled += (size_t)got;
        char *line = buffer;
        for (char *end; (end = memchr(line, '\n', filled - (size_t)(line - buffer))); line = end + 1)
            if (range_count < MAX_RANGES)
                parse_range(line);
        filled -= (size_t)(line - buffer);
        memmove(buffer, line, filled);
    }
    if (descriptor >= 0)
        close(descriptor);
}

static const struct range *range_of(uintptr_t address) {
    if (!range_count)
        read_ranges();
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < range_count && ranges[low].start <= address ? &ranges[low] : NULL;
}

/* Returns 1 when the slot held expected and now holds value. */
static int exchange(word *slot, uintptr_t expected, uintptr_t value) {
    const struct range *range = range_of((uintptr_t)slot);
    if (!range || !(range->protection & PROT_READ) || range->protection & PROT_EXEC || atomic_load(slot) != expected)
        return 0;
    if (range->protection & PROT_WRITE)
        return atomic_compare_exchange_strong(slot, &expected, value);
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)((uintptr_t)slot & ~(page_size - 1));
    if (mprotect(page, page_size, PROT_READ | PROT_WRITE))
        return 0;
    int done = atomic_compare_exchange_strong(slot, &expected, value);
    mprotect(page, page_size, range->protection);
    return done;
}

/* --- objects ----------------------------------------------------------------------------------------------------------- */

/* glibc turns the pointers of a dynamic section into addresses, musl leaves them relative. */
static const void *pointer(const struct view *view, ElfW(Addr) value) {
    return (const void *)(inside(view, value) ? value : view->base + value);
}

static struct view look(const struct dl_phdr_info *info) {
    struct view view = {.base = info->dlpi_addr, .low = UINTPTR_MAX};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        if (header->p_type == PT_DYNAMIC)
            view.dynamic = (const ElfW(Dyn) *)start;
        if (header->p_type != PT_LOAD)
            continue;
        view.low = start < view.low ? start : view.low;
        view.high = start + header->p_memsz > view.high ? start + header->p_memsz : view.high;
    }
    return view;
}

static void look_up_dynamic(struct view *view) {
    for (const ElfW(Dyn) *entry = view->dynamic; entry && entry->d_tag != DT_NULL; entry++) {
        ElfW(Addr) value = entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB)
            view->symbols = pointer(view, value);
        else if (entry->d_tag == DT_STRTAB)
            view->strings = pointer(view, value);
        else if (entry->d_tag == DT_RELA)
            view->relocations[0] = pointer(view, value);
        else if (entry->d_tag == DT_RELASZ)
            view->counts[0] = value / sizeof(ElfW(Rela));
        else if (entry->d_tag == DT_JMPREL)
            view->relocations[1] = pointer(view, value);
        else if (entry->d_tag == DT_PLTRELSZ)
            view->counts[1] = value / sizeof(ElfW(Rela));
    }
}

static int begins(const char *text, const char *prefix) {
    return !strncmp(text, prefix, strlen(prefix));
}

/* Ourselves, what is below the hooks, and memray's own traffic. */
static int is_skipped(const char *path, const struct view *view) {
    static const char *const names[] = {"libc.so.", "ld-linux", "ld-musl", "linux-vdso", "_memray.", "_spans."};
    static const char memray_libraries[] = "/memray.libs/";
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t tail = sizeof memray_libraries - 1;
    if (inside(view, (uintptr_t)&is_skipped) || view->low == libc_view.low || view->low == pthread_view.low)
        return 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (begins(name, names[i]))
            return 1;
    return (size_t)(name - path) >= tail && begins(name - tail, memray_libraries);
}

static const struct call *find_call(const char *name) {
    if (*name == '_' ? name[1] != '_' : !*name || !strchr("fmprsw", *name))
        return NULL;
    for (size_t i = 0; i < copytrace_call_count; i++)
        if (!strcmp(copytrace_calls[i].name, name))
            return copytrace_calls[i].global && *copytrace_calls[i].real ? &copytrace_calls[i] : NULL;
    return NULL;
}

/* Appends the slots of an object to slots, as far as there is room; returns how many. */
static size_t parse(struct view *view, struct slot *slots, size_t room) {
    size_t count = 0;
    look_up_dynamic(view);
    for (int part = 0; part < 2 && view->symbols && view->strings; part++) {
        const ElfW(Rela) *relocation = view->relocations[part];
        for (size_t i = 0; relocation && i < view->counts[part] && count < room; i++, relocation++) {
            size_t symbol = ELF64_R_SYM(relocation->r_info), type = ELF64_R_TYPE(relocation->r_info);
            if (!symbol || (type != JUMP_SLOT && type != GLOB_DAT && (type != ABSOLUTE || relocation->r_addend)))
                continue;
            uintptr_t address = view->base + relocation->r_offset;
            if (view->symbols[symbol].st_shndx != SHN_UNDEF || address % sizeof(word) || !inside(view, address))
                continue;
            const struct call *call = find_call(view->strings + view->symbols[symbol].st_name);
            if (call)
                slots[count++] = (struct slot){(word *)address, call, 0};
        }
    }
    return count;
}

/* --- objects.tsv: sequence, base, low, high, size, modification time (ns), path ---------------------------------------- */

static char listing[1 << 16];
static size_t listed;

static void flush_listing(void) {
    if (listed)
        copytrace_append("objects.tsv", listing, listed);
    listed = 0;
}

static void list_object(const char *name, const struct view *view) {
    char path[PATH_MAX];
    struct stat status;
    if (*name == '/')
        snprintf(path, sizeof path, "%s", name);
    else if (!realpath(*name ? name : "/proc/self/exe", path))
        return;
    if (stat(path, &status))
        return;
    if (listed + PATH_MAX + 256 > sizeof listing)
        flush_listing();
    listed += (size_t)snprintf(listing + listed, sizeof listing - listed, "%ju\t%ju\t%ju\t%ju\t%jd\t%jd%09ld\t%s\n",
                               (uintmax_t)copytrace_sequence(), (uintmax_t)view->base, (uintmax_t)view->low,
                               (uintmax_t)view->high, (intmax_t)status.st_size, (intmax_t)status.st_mtim.tv_sec,
                               status.st_mtim.tv_nsec, path);
}

/* --- patching ---------------------------------------------------------------------------------------------------------- */

struct patch {
    struct table *next;
    int list_all;
    int begun, unsettled;
    unsigned long long adds, subs;
};

static uint64_t hash_name(const char *name) {
    uint64_t hash = UINT64_C(0xCBF29CE484222325);
    while (*name)
        hash = (hash ^ (unsigned char)*name++) * UINT64_C(0x100000001B3);
    return hash;
}

static const struct object *known_object(const struct view *view) {
    for (size_t i = 0; i < table->object_count; i++)
        if (table->objects[i].base == view->base && table->objects[i].dynamic == view->dynamic)
            return &table->objects[i];
    return NULL;
}

static uintptr_t known_original(const struct object *object, const word *address) {
    for (size_t i = 0; object && i < object->slot_count; i++)
        if (table->slots[object->first_slot + i].address == address)
            return table->slots[object->first_slot + i].original;
    return 0;
}

/* Another tool's hook is not: we leave it alone. */
static int is_genuine(const struct view *view, const struct call *call, uintptr_t value) {
    return value
           && (value == *call->real || value == call->global || inside(view, value) || inside(&libc_view, value)
               || inside(&pthread_view, value));
}

static void patch_slot(const struct view *view, const struct object *known, struct slot *slot) {
    uintptr_t value = atomic_load(slot->address);
    if (value == slot->call->hook)
        slot->original = known_original(known, slot->address);
    else if (is_genuine(view, slot->call, value) && exchange(slot->address, value, slot->call->hook))
        slot->original = value;
    else
        slot->original = 0;
    patched += slot->original != 0;
}

static int patch_object(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct patch *patch = data;
    struct table *next = patch->next;
    if (!patch->begun) {
        patch->begun = 1;
        patch->adds = info->dlpi_adds;
        patch->subs = info->dlpi_subs;
        if ((patch->unsettled = patch->adds != adds_settled))
            return 1;
        patched = 0;
    }
    if (next->object_count == MAX_OBJECTS)
        return 1;
    struct view view = look(info);
    const struct object *known = known_object(&view);
    struct object *object = &next->objects[next->object_count++];
    *object = (struct object){view.base, view.dynamic, hash_name(info->dlpi_name), next->slot_count, 0};
    if (patch->list_all || !known || known->name != object->name)
        list_object(info->dlpi_name, &view);
    if (is_skipped(info->dlpi_name, &view))
        return 0;
    struct slot *slots = &next->slots[next->slot_count];
    size_t room = MAX_SLOTS - next->slot_count;
    if (known && patch->subs == subs_patched && known->slot_count <= room) {
        object->slot_count = known->slot_count;
        memcpy(slots, &table->slots[known->first_slot], known->slot_count * sizeof *slots);
    } else
        object->slot_count = parse(&view, slots, room);
    next->slot_count += object->slot_count;
    for (size_t i = 0; i < object->slot_count; i++)
        patch_slot(&view, known, &slots[i]);
    return 0;
}

int copytrace_slots_patch(int first) {
    struct patch patch = {.next = &tables[table == &tables[0]], .list_all = first};
    patch.next->object_count = patch.next->slot_count = 0;
    range_count = 0;
    dl_iterate_phdr(patch_object, &patch);
    if (patch.unsettled)
        return 1;
    flush_listing();
    table = patch.next;
    adds_patched = patch.adds;
    subs_patched = patch.subs;
    return 0;
}

static int restore_object(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    (void)data;
    struct view view = look(info);
    const struct object *known = known_object(&view);
    for (size_t i = 0; known && i < known->slot_count; i++) {
        const struct slot *slot = &table->slots[known->first_slot + i];
        if (slot->original && inside(&view, (uintptr_t)slot->address))
            exchange(slot->address, slot->call->hook, slot->original);
    }
    return 0;
}

void copytrace_slots_restore(void) {
    range_count = 0;
    if (patched)
        dl_iterate_phdr(restore_object, NULL);
    for (size_t i = 0; i < table->slot_count; i++)
        table->slots[i].original = 0;
    patched = 0;
}

size_t copytrace_slots_patched(void) {
    return patched;
}

/* --- the loader's state ------------------------------------------------------------------------------------------------ */

static int read_adds(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    *(unsigned long long *)data = info->dlpi_adds;
    return 1;
}

static unsigned long long adds(void) {
    unsigned long long adds = 0;
    dl_iterate_phdr(read_adds, &adds);
    return adds;
}

int copytrace_slots_stale(void) {
    return adds() != adds_patched;
}

void copytrace_slots_settle(void) {
    Dl_info info;
    adds_settled = adds();
    dladdr((void *)&copytrace_slots_settle, &info); /* takes the lock that dlopen holds until the constructors have run */
}

static int find_libraries(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    const uintptr_t *functions = data;
    struct view view = look(info);
    if (inside(&view, functions[0]))
        libc_view = view;
    if (inside(&view, functions[1]))
        pthread_view = view;
    return 0;
}

void copytrace_slots_initialise(void) {
    uintptr_t functions[] = {(uintptr_t)dlsym(RTLD_NEXT, "sysconf"), (uintptr_t)dlsym(RTLD_NEXT, "pthread_key_create")};
    dl_iterate_phdr(find_libraries, functions);
}

struct visit {
    copytrace_visitor *visitor;
    void *data;
};

static int visit_object(struct dl_phdr_info *info, size_t size, void *data) {
    static struct slot slots[MAX_SLOTS];
    (void)size;
    struct visit *visit = data;
    struct view view = look(info);
    size_t count = is_skipped(info->dlpi_name, &view) ? 0 : parse(&view, slots, MAX_SLOTS);
    for (size_t i = 0; i < count; i++)
        visit->visitor(visit->data, info->dlpi_name, slots[i].call->name, (uintptr_t)slots[i].address,
                       atomic_load(slots[i].address));
    return 0;
}

void copytrace_slots_visit(copytrace_visitor *visitor, void *data) {
    dl_iterate_phdr(visit_object, &(struct visit){visitor, data});
}
