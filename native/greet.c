/* The first request of a connection: a worker is told what it works for, or taken over. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "request.h"

static void answer_features(uint64_t request)
{
	struct builder *b = answer_begin(TYPE_OK, request);
	char text[64];

	build_u64(b, TAG_VERSION, PROTOCOL_VERSION);
	build_u64(b, TAG_NUMBER, (uint64_t)getpid());
	for (size_t i = 0; step_name(i); i++) {
		snprintf(text, sizeof(text), "step:%s", step_name(i));
		build_text(b, TAG_FEATURE, text);
	}
	for (int i = 0; i < CONTROLLERS; i++)
		if (worker.cgroups.v1[i] >= 0 || worker.cgroups.v2[i]) {
			snprintf(text, sizeof(text), "limit:%s", controller_names[i]);
			build_text(b, TAG_FEATURE, text);
		}
	build_text(b, TAG_FEATURE, worker.cgroups.split ? "cgroups:v2" : "cgroups:hybrid");
	answer_send(b);
}

/* NAME=PATH of a hierarchy, each. */
static int use_cgroups(const char **groups, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		const char *sign = strchr(groups[i], '=');

		TRY(sign ? cgroups_use(groups[i], (size_t)(sign - groups[i]), sign + 1) : -EINVAL);
	}
	return cgroups_finish();
}

/* From here on what it works for is this daemon's. */
static int welcome(struct request *r, int client)
{
	r->stage = "client";
	if (client >= 0)
		TRY(connection_watch(keep_fd(r, client)));
	connection_greeted();
	return 0;
}

int handle_hello(struct request *r)
{
	const char *groups[8], *node = NULL;
	size_t group_count = 0;
	uint64_t version = 0, grace = 0;
	int layers = -1, spool = -1, program = -1, client = -1, listener = -1;

	TRY(TAKE(r, NUMBERS(TAG_VERSION, &version, 1), TEXT(TAG_NODE_ID, &node, ID_MAX),
		 DESCRIPTOR(TAG_LAYERS_FD, &layers), DESCRIPTOR(TAG_SPOOL_FD, &spool),
		 DESCRIPTOR(TAG_SELF_FD, &program), DESCRIPTOR(TAG_CLIENT_FD, &client),
		 DESCRIPTOR(TAG_LISTEN_FD, &listener), NUMBERS(TAG_GRACE, &grace, 1),
		 TEXTS(TAG_CGROUP, groups, &group_count)));
	if (version != PROTOCOL_VERSION)
		return refuse(r, EPROTO, "another version of the protocol");
	if (worker.greeted)
		return refuse(r, EPROTO, "a second HELLO");
	if (layers < 0 || spool < 0 || program < 0)
		return refuse(r, EPROTO, "a descriptor is missing");
	r->stage = "cgroups";
	TRY(use_cgroups(groups, group_count));
	r->stage = "mount namespace";
	TRY(rootfs_prepare(layers));
	/* Until then nothing outlives the connection. */
	r->stage = "listen";
	if (listener >= 0)
		TRY(attach_listen(keep_fd(r, listener), grace));
	worker.spool = keep_fd(r, spool);
	worker.program = keep_fd(r, program);
	TRY(welcome(r, client));
	worker.greeted = true;
	inotify_prepare();
	answer_features(r->frame->request);
	return 0;
}

int handle_attach(struct request *r)
{
	int client = -1;

	TRY(TAKE(r, DESCRIPTOR(TAG_CLIENT_FD, &client)));
	if (!worker.greeted || connection_is_greeted() || worker.ending)
		return refuse(r, EPROTO, "there is nothing to take over");
	TRY(welcome(r, client));
	attach_done();
	answer_features(r->frame->request);
	return 0;
}
