/* The first request of a connection: a worker is told what it works for, or taken over. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "init.h"
#include "request.h"

static void answer_features(uint64_t request)
{
	struct builder *b = answer_begin(TYPE_OK, request);
	char text[64];

	build_u64(b, TAG_VERSION, PROTOCOL_VERSION);
	build_u64(b, TAG_NUMBER, (uint64_t)getpid());
	for (size_t i = 0; i < worker_step_count; i++) {
		snprintf(text, sizeof(text), "step:%s", worker_steps[i]);
		build_text(b, TAG_FEATURE, text);
	}
	for (size_t i = 0; i < init_step_count; i++) {
		snprintf(text, sizeof(text), "step:%s", init_steps[i]);
		build_text(b, TAG_FEATURE, text);
	}
	if (worker.cgroups.memory >= 0 || worker.cgroups.v2_memory)
		build_text(b, TAG_FEATURE, "limit:memory");
	if (worker.cgroups.cpu >= 0 || worker.cgroups.v2_cpu)
		build_text(b, TAG_FEATURE, "limit:cpu");
	if (worker.cgroups.pids >= 0 || worker.cgroups.v2_pids)
		build_text(b, TAG_FEATURE, "limit:pids");
	build_text(b, TAG_FEATURE, worker.cgroups.split ? "cgroups:v2" : "cgroups:hybrid");
	answer_send(b);
}

void greet_hello(struct request *r)
{
	const char *groups[8];
	size_t group_count = 0;
	uint64_t version = 0, grace = 0;
	int layers = -1, spool = -1, program = -1, client = -1, listener = -1, error = 0;
	struct field field;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_VERSION)
			take_numbers(r, &field, &version, 1);
		else if (field.tag == TAG_NODE_ID)
			take_text(r, &field, ID_MAX);
		else if (field.tag == TAG_LAYERS_FD)
			layers = take_fd(r, &field, 0);
		else if (field.tag == TAG_SPOOL_FD)
			spool = take_fd(r, &field, 0);
		else if (field.tag == TAG_SELF_FD)
			program = take_fd(r, &field, 0);
		else if (field.tag == TAG_CLIENT_FD)
			client = take_fd(r, &field, 0);
		else if (field.tag == TAG_LISTEN_FD)
			listener = take_fd(r, &field, 0);
		else if (field.tag == TAG_GRACE)
			take_numbers(r, &field, &grace, 1);
		else if (field.tag == TAG_CGROUP && group_count < ARRAY_LEN(groups))
			groups[group_count++] = take_text(r, &field, TEXT_MAX);
		else
			unknown_tag(r);
	}
	if (version != PROTOCOL_VERSION)
		refuse(r, EPROTO, "another version of the protocol");
	if (worker.greeted)
		refuse(r, EPROTO, "a second HELLO");
	if (layers < 0 || spool < 0 || program < 0)
		refuse(r, EPROTO, "a descriptor is missing");
	if (refused(r))
		return;
	terminate(r);
	for (size_t i = 0; i < group_count && !error; i++) {
		char *sign = strchr(groups[i], '=');

		if (sign)
			*sign = '\0';
		error = sign ? cgroups_use(groups[i], sign + 1) : -EINVAL;
	}
	error = error ? error : cgroups_finish();
	if (error) {
		answer_error(r->frame->request, -error, "cgroups", "");
		return;
	}
	error = rootfs_prepare(layers);
	if (error) {
		answer_error(r->frame->request, -error, "mount namespace", "");
		return;
	}
	/* Until then nothing outlives the connection. */
	error = listener < 0 ? 0 : attach_listen(keep_fd(r, listener), grace);
	if (error) {
		answer_error(r->frame->request, -error, "listen", "");
		return;
	}
	worker.spool = keep_fd(r, spool);
	worker.program = keep_fd(r, program);
	error = client < 0 ? 0 : connection_watch(keep_fd(r, client));
	if (error) {
		answer_error(r->frame->request, -error, "client", "");
		return;
	}
	worker.greeted = true;
	inotify_prepare();
	connection_greeted();
	answer_features(r->frame->request);
}

void greet_attach(struct request *r)
{
	struct field field;
	int client = -1, error;

	EACH_FIELD(r, field)
	{
		if (field.tag == TAG_CLIENT_FD)
			client = take_fd(r, &field, 0);
		else
			unknown_tag(r);
	}
	if (!worker.greeted || connection_is_greeted() || worker.ending)
		refuse(r, EPROTO, "there is nothing to take over");
	if (refused(r))
		return;
	error = client < 0 ? 0 : connection_watch(keep_fd(r, client));
	if (error) {
		answer_error(r->frame->request, -error, "client", "");
		return;
	}
	connection_greeted();
	attach_done();
	answer_features(r->frame->request);
}
