/*
 * For tests only, by LD_PRELOAD: has torchmonarch use a software device.
 *
 * torchmonarch contains rdma-core with the providers of mlx5 and EFA alone. As Python loads its
 * library, the functions of verbs in it are replaced by jumps to those of the system's libibverbs,
 * which has a provider for the kernel's software RoCE. The device is shown with the vendor's
 * number of Mellanox, and queue pairs that would be made by mlx5dv are made by ibv_create_qp.
 *
 * VERBS_LOG names a file that gets a line for each registration of memory and its end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <infiniband/verbs.h>

#define LIBRARY "_rust_bindings.cpython"
#define MELLANOX 0x02c9
#define PAGE 4096ul

#undef ibv_reg_mr
#undef ibv_query_port

static void *verbs;

static void *original(const char *name) { return dlsym(verbs, name); }

static void note(const char *what, const void *address, size_t size) {
    const char *path = getenv("VERBS_LOG");
    char line[160];
    int file;
    if (!path || (file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) < 0) return;
    int length = snprintf(line, sizeof line, "%d %s %p %zu\n", getpid(), what, address, size);
    if (write(file, line, length) < 0) perror(path);
    close(file);
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attributes) {
    int (*call)(struct ibv_context *, struct ibv_device_attr *) = original("ibv_query_device");
    int failed = call(context, attributes);
    if (!failed) attributes->vendor_id = MELLANOX;
    return failed;
}

static bool is_supported(struct ibv_device *device) { return false; }

static struct ibv_qp *create_qp(
    struct ibv_context *context, struct ibv_qp_init_attr_ex *wanted, void *of_mlx5) {
    struct ibv_qp *(*call)(struct ibv_pd *, struct ibv_qp_init_attr *) = original("ibv_create_qp");
    struct ibv_qp_init_attr plain = {
        .qp_context = wanted->qp_context, .send_cq = wanted->send_cq, .recv_cq = wanted->recv_cq,
        .srq = wanted->srq, .cap = wanted->cap, .qp_type = wanted->qp_type,
        .sq_sig_all = wanted->sq_sig_all};
    return call(wanted->pd, &plain);
}

static int modify_qp(struct ibv_qp *pair, struct ibv_qp_attr *attributes, int mask) {
    int (*call)(struct ibv_qp *, struct ibv_qp_attr *, int) = original("ibv_modify_qp");
    const char *patience = getenv("VERBS_TIMEOUT"); /* an emulated machine is slow to answer */
    if (patience && (mask & IBV_QP_TIMEOUT)) attributes->timeout = atoi(patience);
    return call(pair, attributes, mask);
}

static struct ibv_mr *reg_mr(struct ibv_pd *domain, void *address, size_t size, int access) {
    struct ibv_mr *(*call)(struct ibv_pd *, void *, size_t, int) = original("ibv_reg_mr");
    struct ibv_mr *region = call(domain, address, size, access);
    note(region ? "register" : "fail", address, size);
    return region;
}

static int dereg_mr(struct ibv_mr *region) {
    int (*call)(struct ibv_mr *) = original("ibv_dereg_mr");
    note("unregister", region->addr, region->length);
    return call(region);
}

static const struct { const char *name; void *by; } replaced[] = {
    {"ibv_query_device", query_device}, {"ibv_modify_qp", modify_qp}, {"ibv_reg_mr", reg_mr},
    {"ibv_dereg_mr", dereg_mr}, {"mlx5dv_is_supported", is_supported},
    {"mlx5dv_create_qp", create_qp}};

static const char *passed_on[] = {
    "ibv_alloc_pd", "ibv_dealloc_pd", "ibv_open_device", "ibv_close_device", "ibv_create_ah",
    "ibv_destroy_ah", "ibv_create_cq", "ibv_destroy_cq", "ibv_create_qp", "ibv_destroy_qp",
    "ibv_query_qp", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr", "ibv_free_device_list",
    "ibv_get_device_list", "ibv_get_device_name", "ibv_qp_to_qp_ex", "ibv_query_port",
    "ibv_query_gid", "ibv_get_device_guid", "ibv_get_async_event", "ibv_ack_async_event"};

static void *replacement(const char *name) {
    for (size_t n = 0; n < sizeof replaced / sizeof *replaced; n++)
        if (!strcmp(name, replaced[n].name)) return replaced[n].by;
    for (size_t n = 0; n < sizeof passed_on / sizeof *passed_on; n++)
        if (!strcmp(name, passed_on[n])) return original(name);
    return NULL;
}

static void jump(uintptr_t at, void *to) { /* jmp [rip+0]; address */
    unsigned char code[14] = {0xff, 0x25};
    void *page = (void *)(at & ~(PAGE - 1));
    memcpy(code + 6, &to, 8);
    if (mprotect(page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC)) abort();
    memcpy((void *)at, code, sizeof code);
    mprotect(page, 2 * PAGE, PROT_READ | PROT_EXEC);
}

static int find(struct dl_phdr_info *info, size_t size, void *found) {
    if (!info->dlpi_name || !strstr(info->dlpi_name, LIBRARY)) return 0;
    *(struct dl_phdr_info *)found = *info;
    return 1;
}

static void replace(void) {
    static bool done;
    struct dl_phdr_info library;
    struct stat status;
    if (done || !dl_iterate_phdr(find, &library)) return;
    done = true;
    if (!(verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL))) abort();
    int file = open(library.dlpi_name, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &status)) abort();
    char *start = mmap(NULL, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (start == MAP_FAILED) abort();
    close(file);
    const Elf64_Ehdr *header = (void *)start;
    const Elf64_Shdr *section = (void *)(start + header->e_shoff);
    for (int n = 0; n < header->e_shnum; n++) {
        if (section[n].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym *symbol = (void *)(start + section[n].sh_offset);
        const char *names = start + section[section[n].sh_link].sh_offset;
        for (size_t left = section[n].sh_size / sizeof *symbol; left; left--, symbol++) {
            if (ELF64_ST_TYPE(symbol->st_info) != STT_FUNC || !symbol->st_value) continue;
            void *by = replacement(names + symbol->st_name);
            if (by) jump(library.dlpi_addr + symbol->st_value, by);
        }
    }
    munmap(start, status.st_size);
}

void *dlopen(const char *path, int flags) {
    void *(*call)(const char *, int) = dlsym(RTLD_NEXT, "dlopen");
    void *library = call(path, flags);
    if (library && path && strstr(path, LIBRARY)) replace();
    return library;
}
