/* Proves that the hooks are in force: reads, in every loaded library with device code, what its CUDA calls are bound to.
 *
 * The dynamic linker writes the address of a called function into a slot that a relocation of the caller names. */
#define _GNU_SOURCE
#include "hooks.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>

#if defined(__x86_64__)
#define BINDS(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define BINDS(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT || (type) == R_AARCH64_ABS64)
#endif

/* They return no error. */
static const char *const unrecorded[] = {
    "__cudaPushCallConfiguration", "__cudaPopCallConfiguration", "__cudaRegisterFatBinary", "__cudaRegisterFatBinaryEnd",
    "__cudaUnregisterFatBinary",   "__cudaRegisterVar",          "__cudaRegisterManagedVar", "__cudaInitModule",
    "cudaGetErrorString",          "cudaGetErrorName",           "cuGetErrorString",         "cuGetErrorName",
    "cublasGetStatusString",       "cublasGetStatusName",
};

struct tables {
    const ElfW(Sym) *symbols;
    const char *strings;
    const ElfW(Rela) *relocations[2];
    size_t counts[2];
};

#define OBJECTS 32

struct object {
    ElfW(Addr) base;
    struct tables tables;
};

struct survey {
    struct isolate_live *live;
    const void *self; /* where this library is loaded */
    void *handle;
    struct object objects[OBJECTS];
};

/* The linker rewrites most pointers of the dynamic section to addresses; where it has not, they are offsets. */
static ElfW(Addr) address(const struct dl_phdr_info *info, ElfW(Addr) value) {
    return value < info->dlpi_addr ? info->dlpi_addr + value : value;
}

static bool read_tables(const struct dl_phdr_info *info, struct tables *tables) {
    const ElfW(Dyn) *entry = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        }
    }
    memset(tables, 0, sizeof *tables);
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB: tables->symbols = (const void *)address(info, entry->d_un.d_ptr); break;
        case DT_STRTAB: tables->strings = (const void *)address(info, entry->d_un.d_ptr); break;
        case DT_JMPREL: tables->relocations[0] = (const void *)address(info, entry->d_un.d_ptr); break;
        case DT_PLTRELSZ: tables->counts[0] = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
        case DT_RELA: tables->relocations[1] = (const void *)address(info, entry->d_un.d_ptr); break;
        case DT_RELASZ: tables->counts[1] = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
        }
    }
    return tables->symbols && tables->strings;
}

static bool is_cuda(const char *name) {
    return !strncmp(name, "cuda", 4) || !strncmp(name, "__cuda", 6) || !strncmp(name, "cublas", 6)
        || (!strncmp(name, "cu", 2) && name[2] >= 'A' && name[2] <= 'Z');
}

static bool is_unrecorded(const char *name) {
    for (size_t i = 0; i < sizeof unrecorded / sizeof *unrecorded; i++) {
        if (!strcmp(name, unrecorded[i])) {
            return true;
        }
    }
    return false;
}

static const void *object_of(const void *place) {
    Dl_info info;
    return place && dladdr(place, &info) ? info.dli_fbase : NULL;
}

static void note(const char *what, const char *symbol) {
    struct isolate_record record;
    isolate_blank(&record, ISOLATE_NOTE);
    record.call = isolate_string(what);
    record.name = isolate_string(symbol);
    isolate_end(isolate_begin(&record), &record);
}

static void judge(const struct survey *survey, ElfW(Addr) caller, const char *name, const void *bound) {
    const void *object = object_of(bound);
    bool has_hook = object_of(dlsym(survey->handle, name)) == survey->self;
    if (is_unrecorded(name)) {
        survey->live->unrecorded++;
    } else if (!has_hook) {
        survey->live->uncovered++;
        note("no hook for an import", name);
    } else if (object == survey->self) {
        survey->live->hooked++;
    } else if (!object || object == (const void *)caller) {
        survey->live->unresolved++; /* still points to the caller's own stub */
    } else {
        survey->live->elsewhere++;
        note("an import is bound past its hook", name);
    }
}

/* Calls a shared CUDA runtime to register device code. */
static bool has_device_code(const struct tables *tables) {
    for (int table = 0; table < 2; table++) {
        for (size_t i = 0; tables->relocations[table] && i < tables->counts[table]; i++) {
            const ElfW(Sym) *symbol = &tables->symbols[ELF64_R_SYM(tables->relocations[table][i].r_info)];
            if (!strcmp(tables->strings + symbol->st_name, "__cudaRegisterFatBinary")) {
                return symbol->st_shndx == SHN_UNDEF;
            }
        }
    }
    return false;
}

/* Only collects: the linker's lock is held. */
static int collect(struct dl_phdr_info *info, size_t size, void *argument) {
    (void)size;
    struct survey *survey = argument;
    struct tables tables;
    if ((const void *)info->dlpi_addr != survey->self && read_tables(info, &tables) && has_device_code(&tables)
        && survey->live->libraries < OBJECTS) {
        survey->objects[survey->live->libraries++] = (struct object){info->dlpi_addr, tables};
    }
    return 0;
}

static void survey_object(const struct survey *survey, const struct object *object) {
    const struct tables *tables = &object->tables;
    for (int table = 0; table < 2; table++) {
        for (size_t i = 0; tables->relocations[table] && i < tables->counts[table]; i++) {
            const ElfW(Rela) *relocation = &tables->relocations[table][i];
            const ElfW(Sym) *symbol = &tables->symbols[ELF64_R_SYM(relocation->r_info)];
            const char *name = tables->strings + symbol->st_name;
            if (symbol->st_shndx == SHN_UNDEF && BINDS(ELF64_R_TYPE(relocation->r_info)) && is_cuda(name)) {
                judge(survey, object->base, name, *(const void *const *)(object->base + relocation->r_offset));
            }
        }
    }
}

ISOLATE_API void isolate_trace_live(struct isolate_live *live) {
    Dl_info info;
    memset(live, 0, sizeof *live);
    if (!dladdr((void *)isolate_trace_live, &info)) {
        return;
    }
    struct survey survey = {.live = live, .self = info.dli_fbase};
    survey.handle = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    if (!survey.handle) {
        return;
    }
    dl_iterate_phdr(collect, &survey);
    for (uint32_t i = 0; i < live->libraries; i++) {
        survey_object(&survey, &survey.objects[i]);
    }
    dlclose(survey.handle);
    atomic_store(&isolate_all_hooked, live->hooked && !live->uncovered && !live->elsewhere);
}
